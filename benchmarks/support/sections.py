"""The pages of docs/measurements: the benchmarks of each, and what the words there mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.support import gpu_tables, section_tables
from benchmarks.support.compact import compact
from benchmarks.support.results import Rows, plain


@dataclass(frozen=True)
class Section:
    """The tables of one benchmark."""

    module: str  # "speed.wide"
    files: str  # the pattern of its results' names
    title: str
    note: str = ""
    render: Callable[[Rows], str] = plain
    apart: bool = False  # a table per file: each has its own plain decoding


@dataclass(frozen=True)
class Page:
    """One subject."""

    title: str
    shows: str
    sections: tuple[Section, ...]


# The heading of a result that is one of several in its section.
HEADINGS = {
    "smollm2_drafters": "Batch 1",
    "smollm2_drafters_8": "Batch 8",
    "smollm2_drafters_levels": "N-grams below a cast",
    "smollm2_drafters_nested8": "A model of 8 bits",
    "smollm2_drafters_others": "Other drafters",
    "smollm2_never_slower_4": "Batch 4",
    "smollm2_never_slower_8": "Batch 8",
    "smollm2_planner_nested16": "Nested",
    "smollm2_planner_gguf": "4 bits",
    "papers_article": "The article on quantized drafts",
    "papers_ml_specqd": "ML-SpecQD, tables I and II",
    "papers_qspec_4": "QSpec, table 4",
    "papers_qspec_8": "QSpec, table 8",
    "papers_qspec_9_quarot": "QSpec, table 9, QuaRot",
    "papers_qspec_figure_5": "QSpec, figure 5",
    "papers_spectra_1": "SPECTRA, table 1",
    "smollm2_repeated_questions": "A 4-bit model",
    "smollm2_repeated_questions_16": "A bfloat16 model",
    "smollm2_long_1": "Batch 1",
    "smollm2_long_4": "Batch 4",
    "smollm2_long_4096_4": "Batch 4, 4,096 tokens",
    "smollm2_long_4096_8": "Batch 8, 4,096 tokens",
    "smollm2_serving": "Beside `decode_many`",
    "smollm2_latency_serving": "Plain decoding beside llama.cpp's server",
    "smollm2_auto_latency_serving": "`Auto` beside llama.cpp's server",
    "products": "Every kernel",
    "products_groups": "Small groups",
    "schemes": "`tiny-16bit`",
    "smollm2_schemes": "SmolLM2",
    "smollm2_schemes_nested8": "SmolLM2, 8 bits",
    "smollm2_evaluation_gsm8k": "SmolLM2 on GSM8K",
    "smollm2_evaluation_piqa": "SmolLM2 on PIQA",
    "evaluation_1": "`tiny-16bit`",
    "evaluation_kills": "Killed runs",
}

EXACTNESS = Page(
    "exactness",
    "Outputs beside plain decoding's; sampled texts beside their exact distribution.",
    (
        Section("exactness.outputs", "outputs_*", "Greedy outputs, and acceptance",
                render=section_tables.outputs),
        Section("exactness.broken_promises", "*broken_promises", "Five promises broken on purpose",
                "One line of the code is changed; `make test` stops at the first test that fails."),
        Section("exactness.places", "*places", "One prompt in three places",
                "SmolLM2, sampled: the same prompt and key alone, in a batch and in a queue."),
        Section("exactness.logits", "*logits", "Logits beside transformers on torch",
                "SmolLM2's GGUF file, which transformers dequantizes itself; WikiText-2. *near "
                "tie*: the largest distance of the two first choices where they differ."),
        Section("exactness.tokens", "*_tokens", "Token ids beside llama.cpp",
                "Lines of real text and odd ones, encoded by the tokenizer in SmolLM2's GGUF "
                "file."),
        Section("exactness.chi_square", "chi_square*", "Sampled texts",
                "20,000 sampled texts per drafter against their exact distribution. Every drafter "
                "draws from random numbers of its own."),
        Section("exactness.serving", "*_served", "Outputs under load",
                "Greedy and seeded requests from 1 to 32 clients, some of whom leave, beside "
                "`generate` for each alone. *left*: rows, prompts and files afterwards. Tests ran "
                "beside SmolLM2's drafters with 210 responses, so their seconds are too long."),
        Section("exactness.structured", "*_structured", "Answers that keep to a JSON schema",
                "A server with drafts, greedy and seeded requests, beside `generate` without "
                "drafts. *complete*: not cut by the limit of tokens; *invalid*: complete ones "
                "that jsonschema refuses."),
    ),
)  # fmt: skip

REAL_MODEL = Page(
    "drafters of a real model",
    "Drafters of an instruct model beside plain decoding, at batch 1 to 16, greedy and sampled.",
    (
        Section("speed.instruct_drafters", "smollm2_drafters*", "Drafters of a real instruct model",
                "SmolLM2 answers real prompts, reading included. What loses stands first. "
                "Compare within a table: each is one run, of the commit behind its file. "
                "*speedup*: geometric mean over prompts, beside plain decoding of the same "
                "target, with its 95 % interval. *bfloat12* and *nested16* hold the bfloat16 "
                "model exactly, and are compared with it. That one is the Q4_1 file with its "
                "weights written out: they lie on a 4-bit grid. *identical*: the texts are plain "
                "decoding's; sampled ones need not be. The files also hold each kind of text.",
                section_tables.by_drafter, apart=True),
        Section("speed.never_slower", "smollm2_never_slower*", "Does the default ever lose?",
                "`Auto` between two plain decodings of the same target, one batch of real prompts "
                "per kind, reading included. *speedup*: the median of six turns, the least and the "
                "greatest in brackets, which hold the median with a probability of 97 %; "
                "*control*: the same for one plain decoding over the other; *drafted*: tokens, in "
                "all rows and rounds. At batch 4 costly drafts did not have to promise more yet.",
                compact, apart=True),
    ),
)  # fmt: skip

CONTEXTS = Page(
    "long contexts and repeated work",
    "Drafts that see a part of thousands of tokens, and a memory of texts that come again.",
    (
        Section("speed.long_context", "smollm2_long*", "Drafts that see a part of a long context",
                "SmolLM2 goes on with tales, WikiText and many solved exercises. *speedup*: over "
                "plain decoding from the end of the prompt on, geometric mean with its 95 % "
                "interval; *speedup read*: with the reading of the prompt.", compact, apart=True),
        Section("speed.repeated_work", "smollm2_repeated*", "Work that repeats itself",
                "SmolLM2, one prompt at a time, reading and adding to the memory included. The "
                "second pass asks the first one's set with small edits, the third the edited set "
                "again.", compact, apart=True),
    ),
)  # fmt: skip

BILLION = Page(
    "a billion parameters, on CPU and GPU",
    "Drafters of a widened model: its acceptance is a small model's, its cost a large one's.",
    (
        Section("speed.wide", "wide*", "Drafters on CPU and GPU, a billion parameters",
                "`tiny-16bit` widened to 1.04 billion parameters (`benchmarks/support/widen.py`): "
                "acceptance is the small model's, cost the large one's. Prompts are read inside "
                "the time. Nested models are compared with plain decoding in bfloat16. "
                "*identical*: outputs that are plain "
                "decoding's; *round ms*: one turn of the loop; *compile s*: of all programs at "
                "once, the GPU's on 16 cores. On the H100 nothing else ran while decoding was "
                "timed, and each plain row in 4 bits or bfloat16 is the base of those below it. "
                "`Auto`'s costs were measured alone in the second table of the H100, and while "
                "programs were compiled in the first. On the EPYC `wide_8` is of a commit before "
                "rows counted by the rounds that they need, and `wide_8_bfloat16` of one after. "
                "Rows without a temperature are greedy. Sampled outputs of drafters that draw "
                "their drafts, such as `QSpec`, need not be identical: the distribution is.",
                gpu_tables.wide),
        Section("speed.planner", "smollm2_planner*", "Where a model's own draft pays",
                "SmolLM2 drafts for itself by `QSpec`, beside its plain decoding; real prompts, "
                "whose reading is not in the times. Costs and acceptance are measured at the "
                "longest draft, and the formula predicts the speed-ups from them.", compact,
                apart=True),
    ),
)  # fmt: skip

SERVING = Page(
    "serving and structured output",
    "Calls of tools under a schema, the server, and what a user waits for.",
    (
        Section("speed.structured", "smollm2_tools*", "Calls of tools, under a JSON schema",
                "SmolLM2, one request at a time, reading included. *speedup*: over plain decoding "
                "under the same schema, geometric mean with its 95 % interval.", compact,
                apart=True),
        Section("speed.serving", "*_serving", "The server",
                "The clients run on the same cores. *first*, *between*: seconds to the first token "
                "and between two events, which may hold several tokens; *token*: per token after "
                "the first. llama.cpp's server has the same file and as many rows, and computes "
                "with 8-bit activations. Each turn has prompts of its own.",
                section_tables.compact_by_part, apart=True),
        Section("speed.waiting", "smollm2_waiting*", "Waiting for the first token",
                "Seconds in a new process of SmolLM2: *import* beyond JAX's, *load*, the *first* "
                "decode of 4 tokens, and decodes with another prompt length, another "
                "max_new_tokens and another temperature. The second process finds what the first "
                "one compiled."),
    ),
)  # fmt: skip

BATCHING = Page(
    "batching and layers",
    "Continuous batching, layers in one stack, and halves of a batch that take turns.",
    (
        Section("speed.batching", "batching", "Continuous batching",
                "500 real prompts on `tiny`; *ratio* is over static batching.", compact),
        Section("speed.layers", "layers", "Layers in one stack, or one by one"),
        Section("speed.overlapped", "smollm2_overlapped", "Two halves of a batch, a core each",
                "One half may draft while the other verifies. *speedup*: the whole batch's time on "
                "both cores over that of the slower half.", compact),
    ),
)  # fmt: skip

ENGINES = Page(
    "beside other engines",
    "Plain decoding and drafters beside llama.cpp and OpenVINO, measured in the same runs.",
    (
        Section("speed.beside_llama_cpp", "smollm2_llama_cpp*", "Beside llama.cpp on the same file",
                "*read*: up to the first new token; *generate*: 64 tokens after it; *first*: from "
                "the shell to the first token; *texts*: greedy answers.",
                section_tables.compact_by_part, apart=True),
        Section("speed.beside_speculation", "smollm2_engines",
                "Speculative decoding of three engines",
                "SmolLM2 answers real prompts greedily, one at a time, reading included; all "
                "engines take turns. *speedup*: over the same engine's plain decoding, with its "
                "95 % interval. *beside plain*: tokens per second over those of specjax's plain "
                "decoding of the same weights. *identical*: answers that are those of the same "
                "engine's plain decoding. llama.cpp has 8-bit activations.", compact),
        Section("speed.decode_step", "decode_step*", "A decode step, a billion parameters",
                "Llama-3.2-1B's shape in 4 bits, beside llama.cpp and OpenVINO in the same run. "
                "*over best same bits*: beside those whose activations have as many bits. "
                "llama.cpp always has 8, OpenVINO has 8 by default. A prompt is read with the "
                "logits of every token.",
                compact, apart=True),
    ),
)  # fmt: skip

PAPERS = Page(
    "the papers' tables, measured",
    "Tables of the papers, measured on a small model, with the printed numbers beside.",
    (
        Section("speed.papers", "papers_*", "Tables of the papers",
                "SmolLM2, greedy, reading included, beside plain decoding on the same kernels. "
                "*kept*: accepted over drafted; *accepted*: over the drafts that were decided on; "
                "*draft share*: of a round's time. *paper*: what its authors print for *compared*, "
                "on larger models and GPUs or servers.", section_tables.papers, apart=True),
        Section("speed.dequantized_base", "smollm2_dequantized_base", "QSpec beside two bases",
                "SmolLM2 in 4 bits, greedy, reading included. *speedup*: over our plain decoding, "
                "with its 95 % interval; this one counts. *over dequantizing*: over plain decoding "
                "in bfloat16 with the time of writing out all matrices at every pass, a sum of "
                "two measured times.", compact),
    ),
)  # fmt: skip

KERNELS = Page(
    "kernels",
    "Matrix products beside the machine's limit, sampling, and programs for GPUs and TPUs.",
    (
        Section("kernels.products", "products*", "Matrix products",
                "Medians over the layers' shapes of several models. The limit is the memory's or "
                "the arithmetic's rate, whichever binds, from the same run. *takes*: time over "
                "ours. On a CPU torch's has some microseconds of a call from Python. *q4_1*: "
                "groups of 32 with minima, as in GGUF files; other 4-bit integers have 128.",
                section_tables.products, apart=True),
        Section("gpu_check", "gpu_check*", "Kernels on a GPU: numerics and exactness",
                "Fresh random inputs beside float64; *error of bound*: the worst error as a part "
                "of what float32 sums may err; rows and tokens alone and in company, bit for bit; "
                "layers together and one by one, and fewer rows of them; QSpec on `tiny` beside "
                "plain decoding. The first table's products came before the last change to the "
                "kernel of 4 bits; the second table's layers and decoding ran after it.",
                gpu_tables.checked),
        Section("gpu_check", "gpu_speed", "Kernels on a GPU: speed",
                "Attention with Llama-3-8B's heads, and some of its layers, beside the device's "
                "measured limits. Microseconds with a launch that prepares x. The kernels of 4 "
                "bits have changed since.", gpu_tables.timed),
        Section("kernels.sampling", "sampling", "Choosing a token", "Milliseconds."),
        Section("kernels.compile_check_gpu", "compile_check_gpu", "Kernels compiled for a GPU",
                "Compiled for an H100 without one; what the compiler reports, over all sizes of "
                "a kernel.", section_tables.compiled_for_gpus),
        Section("kernels.compile_check_tpu", "compile_check_tpu*", "Kernels compiled for TPUs",
                "Compiled without a device; none has run on one.", section_tables.compiled),
    ),
)  # fmt: skip

ACCEPTANCE = Page(
    "acceptance",
    "Drafts that a real model keeps, by drafter and kind of text.",
    (
        Section("quality.acceptance", "*acceptance", "Acceptance on real text",
                "SmolLM2-135M-Instruct. *gguf*: the model as its file has it; *bfloat16*: the "
                "same, dequantized. Its weights lie on a 4-bit grid in groups of 32, which "
                "flatters the INT4 cast with groups of 32. In brackets: 95 % intervals over "
                "prompts.", section_tables.accepted),
        Section("quality.memory_tokens", "*_memory", "A memory of texts",
                "SmolLM2; up to 7 drafts per pass of the target. The file also holds each kind of "
                "text.", section_tables.by_tokens),
    ),
)  # fmt: skip

WITHOUT_A_MODEL = Page(
    "drafts without a model",
    "Tokens per verification of n-grams, Lookahead and SPECTRA, corpora, and what drafting costs.",
    (
        Section("quality.compression", "compression*", "Drafts without a model",
                "Tokens per verification of `tiny`. *drafted*: tokens proposed per verification; "
                "*error*: standard error of the mean, from seed to seed; *draft passes*: passes of "
                "the drafting model per token.", section_tables.compression),
        Section("quality.refinement", "refinement", "Refinement of a corpus",
                "Tokens that a look-up gains, by the part of a corpus that is kept."),
        Section("speed.drafter_cost", "drafter_cost*", "Cost of drafters without a model",
                "*share*: proposing and observing, as a part of a round."),
    ),
)  # fmt: skip

QUALITY = Page(
    "quality",
    "Quantization schemes, and scores on task sets.",
    (
        Section("quality.schemes", "*schemes*", "Quantization schemes",
                "*ppl*: perplexity by activation precision; *accepted*: token acceptance of "
                "drafts.", apart=True),
        Section("quality.evaluation", "*evaluation*", "Evaluation",
                "Beside a score: its items, and its 95 % interval from *low* to *high*; *95* is "
                "half of one.",
                section_tables.by_part, apart=True),
    ),
)  # fmt: skip

MEMORY = Page(
    "memory",
    "Bytes and seconds of decoding, conversion, quantization and meshes.",
    (
        Section("memory.footprint", "footprint", "Decoding, against the cache's capacity"),
        Section("memory.convert_1b", "convert_1b", "Conversion of a billion parameters"),
        Section("memory.quantize_1b", "quantize_1b", "Quantization of a billion parameters"),
        Section("memory.parallel", "parallel", "Many devices",
                "Virtual devices of one CPU: bytes and bits, not speed.", section_tables.parallel),
    ),
)  # fmt: skip

# By the file's name.
PAGES = {
    "exactness": EXACTNESS,
    "real_model": REAL_MODEL,
    "contexts": CONTEXTS,
    "billion": BILLION,
    "serving": SERVING,
    "batching": BATCHING,
    "engines": ENGINES,
    "papers": PAPERS,
    "kernels": KERNELS,
    "acceptance": ACCEPTANCE,
    "without_a_model": WITHOUT_A_MODEL,
    "quality": QUALITY,
    "memory": MEMORY,
}
