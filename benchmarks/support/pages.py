"""The pages of docs/measurements: one per subject, a section per benchmark, a table per machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import median
from typing import Any

from benchmarks.support import gpu_tables
from benchmarks.support.results import Result, Rows, figure, load_all, plain
from benchmarks.support.tables import table

SUBJECTS = {
    "exactness": "Outputs beside plain decoding's; sampled texts beside their exact distribution.",
    "speed": "Drafters, batching and layers, beside plain decoding on the same kernels.",
    "kernels": "Matrix products beside the machine's limit, sampling, and programs for TPUs.",
    "quality": "Quantization schemes, drafts without a model, and scores on task sets.",
    "memory": "Bytes and seconds of decoding, conversion, quantization and meshes.",
}

INDEX = """# Measurements

`python -m benchmarks.report` makes these pages from `benchmarks/results/<machine>/*.json`. It also
prints how many commits each result is behind the code. Each table names its machine, its files and
the commits that were measured.

{subjects}

## Machines

{machines}

The machines are rented and shared: rates drift within minutes. Compare numbers of one run only, as
the tables do. `compilers` holds programs that were compiled for other devices.

SmolLM2-135M-Instruct is a real instruct model, and its tables come first. `tiny` and the models
made from it are smaller. Their greedy text repeats itself, and repetition is easy to draft:
acceptance in their tables is higher than on real models.

## Results that are not quoted

These do not name the commit that was measured. They are not in any table or text here.

{unquoted}
"""


@dataclass(frozen=True)
class Section:
    """The tables of one benchmark."""

    module: str  # "speed.drafters": its folder is the subject; without one, the kernels
    files: str  # the pattern of its results' names
    title: str
    note: str = ""
    render: Callable[[Rows], str] = plain
    apart: bool = False  # a table per file: each has its own plain decoding

    @property
    def subject(self) -> str:
        return self.module.rpartition(".")[0] or "kernels"


def pages() -> dict[str, str]:
    """The text of every page, by its path under docs/."""
    results = load_all()
    made = {f"measurements/{subject}.md": _page(subject, results) for subject in SUBJECTS}
    return {"measurements/index.md": _index(results)} | made


def _index(results: Sequence[Result]) -> str:
    subjects = [
        {"page": f"[{name}]({name}.md)", "shows": shows} for name, shows in SUBJECTS.items()
    ]
    machines = dict.fromkeys((r.machine, _processor(r)) for r in results if r.environment)
    lines = [{"folder": f"`{machine}`", "processor": processor} for machine, processor in machines]
    unquoted = [f"- `{r.name}.json`: {r.commit}" for r in results if not r.quotable]
    return INDEX.format(
        subjects=table(subjects, ("page", "shows")),
        machines=table(lines, ("folder", "processor")),
        unquoted="\n".join(unquoted),
    )


def _page(subject: str, results: Sequence[Result]) -> str:
    parts = [f"# Measurements: {subject}", SUBJECTS[subject]]
    for section in SECTIONS:
        if section.subject != subject:
            continue
        mine = [r for r in results if fnmatch(r.name.split("/")[1], section.files) and r.quotable]
        if not mine:
            continue
        mine.sort(key=lambda result: "smollm2" not in result.name)  # the real model leads
        parts.append(f"## {section.title}")
        parts.append(f"`python -m benchmarks.{section.module}`. {section.note}".strip())
        for machine in dict.fromkeys(r.machine for r in mine):
            chosen = [r for r in mine if r.machine == machine]
            parts.append(f"### {_processor(chosen[0])}")
            for group in [[r] for r in chosen] if section.apart else [chosen]:
                parts.append(_source(group))
                parts.append(section.render([row for r in group for row in r.rows]))
    return "\n\n".join(parts) + "\n"


def _processor(result: Result) -> str:
    if result.environment["device"] != "cpu":
        return str(result.environment["device"])
    return f"{result.environment['processor']}, {result.environment['cores']} cores"


def _source(results: Sequence[Result]) -> str:
    files = ", ".join(f"`{r.name}.json` ({r.commit})" for r in results)
    versions = dict.fromkeys(
        f"Python {r.environment['python']}, jax {r.environment['jax']}" for r in results
    )
    return f"{files}; {'; '.join(versions)}."


def _picture(name: str) -> str:
    return f"![{name.replace('-', ' ')}](../pictures/{name}.png)"


def _outputs(rows: Rows) -> str:
    """How many outputs are identical; acceptance of the largest batch."""
    compared = sum(row["prompts"] for row in rows)
    identical = sum(row["identical"] for row in rows)
    qspec = [row for row in rows if "drafter" not in row]
    parts = [
        f"{compared} outputs compared with plain decoding's, **{identical} identical**.",
        "#### QSpec on `tiny`, batch 8",
        _picture("acceptance-tiny"),
        "Probability that a draft is kept given that those before it were, and (in brackets) the "
        "share of all drafts that are kept. *apart*: the verification does not overwrite the "
        "draft's cache entries.",
        _acceptance(
            largest_batch(qspec),
            lambda row: {
                "text": row["kind"],
                "draft": row["activation"],
                "cache": "overwritten" if row["overwrite"] else "apart",
            },
            "draft_length",
        ),
        "#### Drafts from models on `tiny-16bit`, batch 8",
        _acceptance(
            largest_batch([row for row in rows if "drafter" in row]),
            lambda row: {"drafter": row["drafter"], "draft length": row["draft_length"]},
            "kind",
        ),
    ]
    return "\n\n".join(parts)


def largest_batch(rows: Rows) -> Rows:
    """The rows of the largest batch, by draft length."""
    largest = max(row["batch"] for row in rows)
    return sorted((r for r in rows if r["batch"] == largest), key=lambda row: row["draft_length"])


def _acceptance(rows: Rows, head: Callable[[dict[str, Any]], dict[str, Any]], across: str) -> str:
    """One line per `head`, one column per value of `across`."""
    if across == "kind":  # in the order of the drafters' table, not of their lengths
        rows = sorted(rows, key=lambda row: row["drafter"])
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(tuple(head(row).values()), head(row))
        shown = f"{row['token_acceptance']:.3f} ({row['acceptance_rate']:.2f})"
        line[str(row[across])] = shown
    return plain(list(lines.values()))


def _drafters(rows: Rows) -> str:
    lengths = any(row["part"] == "lengths" for row in rows)
    return (f"{_picture('draft-lengths')}\n\n" if lengths else "") + plain(rows)


def _by_part(rows: Rows) -> str:
    """One table per part."""
    parts = dict.fromkeys(row["part"] for row in rows)
    return "\n\n".join(
        f"#### {part.capitalize()}\n\n{plain([row for row in rows if row['part'] == part])}"
        for part in parts
    )


def _compression(rows: Rows) -> str:
    """Tables by part. One prompt at a time gives the same texts, and so the same counts."""
    compared = sum(row.get("compared", 0) for row in rows)
    differing = sum(row.get("differing", 0) for row in rows)
    rows = [row for row in rows if row.get("batch") != 1]
    return (
        f"{compared} greedy outputs compared with plain decoding's, **{differing} differ**.\n\n"
        f"{_picture('tokens-by-step')}\n\n{_picture('acceptance-by-source')}\n\n{_by_part(rows)}"
    )


SHOWN = {
    "tokens_per_round": ("Tokens per round", 2),
    "kept": ("Kept of all drafts", 3),
    "token_acceptance": ("Kept of tested drafts", 3),
}


def _accepted(rows: Rows) -> str:
    """A table per ratio and temperature: a line per drafter, a column per kind of text."""
    greedy = [row for row in rows if row["kind"] == "all" and "identical" in row]
    compared = sum(row["prompts"] for row in greedy)
    differing = compared - sum(row["identical"] for row in greedy)
    parts = [f"{compared} greedy outputs compared with plain decoding's, **{differing} differ**."]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        how = f"at temperature {temperature}" if temperature else "greedy"
        for field, (title, digits) in SHOWN.items():
            lines: dict[str, dict[str, Any]] = {}
            for row in (row for row in rows if row["temperature"] == temperature):
                line = lines.setdefault(
                    row["drafter"], {"target": row["target"], "drafter": row["drafter"]}
                )
                low, middle, high = (
                    figure(row[name], digits) for name in (f"{field}_low", field, f"{field}_high")
                )
                line[row["kind"]] = f"{middle} ({low} – {high})"
            parts += [f"#### {title}, {how}", plain(list(lines.values()))]
    return "\n\n".join(parts)


def _products(rows: Rows) -> str:
    """Medians over the shapes of weights; the JSON has every shape."""
    lines = []
    for kernel, m in dict.fromkeys((row["kernel"], row["m"]) for row in rows):
        chosen = [row for row in rows if (row["kernel"], row["m"]) == (kernel, m)]
        line = {"kernel": kernel, "rows": m, "shapes": len(chosen)}
        line["share of the limit"] = figure(100 * median(r["fraction"] for r in chosen), 0, " %")
        line["least"] = figure(100 * min(r["fraction"] for r in chosen), 0, " %")
        for peer in ("xla", "torch_bf16", "torch_int4pack"):
            times = [r[f"{peer}_seconds"] / r["seconds"] for r in chosen if f"{peer}_seconds" in r]
            if times:
                line[f"{peer} takes".replace("_", " ")] = figure(median(times), 1, "×")
        lines.append(line)
    rates = [row["rate_read"] / 1e9 for row in rows]
    return f"Read bandwidth: {min(rates):.0f} to {max(rates):.0f} GB/s.\n\n{plain(lines)}"


def _compiled(rows: Rows) -> str:
    """Kernels by chip and format."""
    lines = []
    for chip, form in dict.fromkeys((row["chip"], row["format"]) for row in rows):
        chosen = [row for row in rows if (row["chip"], row["format"]) == (chip, form)]
        errors = sum(bool(row["error"]) for row in chosen)
        vmem = max(row["vmem_kib"] for row in chosen)
        lines.append({"chip": chip, "format": form, "programs": len(chosen),
                      "errors": errors, "most vmem KiB": vmem})  # fmt: skip
    return plain(lines)


def _parallel(rows: Rows) -> str:
    meshes = [row for row in rows if "equal" in row]
    moved = [row for row in rows if "equal" not in row]
    return f"{plain(meshes)}\n\nCollectives of one round:\n\n{plain(moved)}"


SECTIONS = (
    Section("exactness.outputs", "outputs_*", "Greedy outputs, and acceptance", render=_outputs),
    Section("exactness.places", "*places", "One prompt in three places",
            "SmolLM2, sampled: the same prompt and key alone, in a batch and in a queue."),
    Section("exactness.logits", "*logits", "Logits beside transformers on torch",
            "SmolLM2's GGUF file, which transformers dequantizes itself; WikiText-2. *near tie*: "
            "the largest distance of the two first choices where they differ."),
    Section("exactness.tokens", "*_tokens", "Token ids beside llama.cpp",
            "Lines of real text and odd ones, encoded by the tokenizer in SmolLM2's GGUF file."),
    Section("exactness.chi_square", "chi_square*", "Sampled texts",
            "100,000 sampled texts per drafter against their exact distribution."),
    Section("exactness.serving", "*_served", "Outputs under load",
            "Greedy and seeded requests from 1 to 32 clients, some of whom leave, beside "
            "`generate` for each alone. *left*: rows, prompts and files afterwards."),
    Section("exactness.structured", "*_structured", "Answers that keep to a JSON schema",
            "A server with drafts, greedy and seeded requests, beside `generate` without drafts. "
            "*complete*: not cut by the limit of tokens; *invalid*: complete ones that jsonschema "
            "refuses."),
    Section("speed.instruct_drafters", "smollm2_drafters*", "Drafters of a real instruct model",
            "SmolLM2 answers real prompts, reading included. *speedup*: geometric mean over "
            "prompts, beside plain decoding of the same target, with its 95 % interval. "
            "*bfloat12* and *nested16* hold the bfloat16 model exactly, and are compared with it.",
            apart=True),
    Section("speed.papers", "papers_*", "Tables of the papers",
            "SmolLM2, greedy, reading included, beside plain decoding on the same kernels. *kept*: "
            "accepted over drafted; *accepted*: over the drafts that were decided on; *draft "
            "share*: of a round's time. *paper*: what its authors print for *compared*, on "
            "larger models and GPUs or servers.", apart=True),
    Section("speed.repeated_work", "smollm2_repeated*", "Work that repeats itself",
            "SmolLM2, one prompt at a time, reading and adding to the memory included. The second "
            "pass asks the first one's set with small edits, the third the edited set again.",
            apart=True),
    Section("speed.long_context", "smollm2_long*", "Drafts that see a part of a long context",
            "SmolLM2 goes on with tales, WikiText and many solved exercises. *speedup*: over plain "
            "decoding from the end of the prompt on, geometric mean with its 95 % interval; "
            "*speedup read*: with the reading of the prompt.", apart=True),
    Section("speed.structured", "smollm2_tools*", "Calls of tools, under a JSON schema",
            "SmolLM2, one request at a time, reading included. *speedup*: over plain decoding "
            "under the same schema, geometric mean with its 95 % interval.", apart=True),
    Section("speed.serving", "*_serving", "The server beside `decode_many`",
            "The clients run on the same cores. *first*, *between*: seconds to the first token and "
            "between two events.", _by_part, apart=True),
    Section("speed.waiting", "smollm2_waiting*", "Waiting for the first token",
            "Seconds in a new process of SmolLM2: *import* beyond JAX's, *load*, the *first* "
            "decode of 4 tokens, and decodes with another prompt length, another max_new_tokens "
            "and another temperature. The second process finds what the first one compiled."),
    Section("speed.beside_llama_cpp", "smollm2_llama_cpp*", "Beside llama.cpp on the same file",
            "*read*: up to the first new token; *generate*: 64 tokens after it; *first*: from the "
            "shell to the first token; *texts*: greedy answers.", _by_part, apart=True),
    Section("speed.drafters", "drafters_*", "Drafters, a billion parameters",
            "The target is `tiny-16bit` widened to 1.04 billion parameters "
            "(`benchmarks/support/widen.py`): acceptance is the small model's, cost the large's. "
            "*speedup* is over plain decoding in the same run. *16-bit head* keeps the output "
            "matrix in 16 bits; *4-bit target* rows compare with plain decoding of that model.",
            _drafters, apart=True),
    Section("speed.wide", "wide*", "Drafters on CPU and GPU, a billion parameters",
            "`tiny-16bit` widened as above, its prompts read inside the time. Nested models are "
            "compared with plain decoding in bfloat16. *identical*: outputs that are plain "
            "decoding's; *round ms*: one turn of the loop; *compile s*: of all programs at once, "
            "the GPU's on 16 cores. On the H100 the kernels were being checked at the same time; "
            "each plain row in 4 bits or bfloat16 is the base of those below it.", gpu_tables.wide),
    Section("speed.qspec", "qspec", "QSpec on `tiny`"),
    Section("speed.planner", "planner", "Predicted and measured speed-up"),
    Section("speed.drafter_cost", "drafter_cost*", "Cost of drafters without a model",
            "*share*: proposing and observing, as a part of a round."),
    Section("speed.batching", "batching", "Continuous batching",
            "500 real prompts on `tiny`; *ratio* is over static batching."),
    Section("speed.decode_step", "decode_step*", "A decode step, a billion parameters",
            "Llama-3.2-1B's shape in 4 bits, beside llama.cpp and OpenVINO in the same run.",
            apart=True),
    Section("speed.layers", "layers", "Layers in one stack, or one by one"),
    Section("kernels.products", "products", "Matrix products",
            "Medians over the layers' shapes of several models. The limit is the memory's or the "
            "arithmetic's rate, whichever binds, from the same run. *takes*: time over ours.",
            _products),
    Section("gpu_check", "gpu_check", "Kernels on a GPU: numerics and exactness",
            "Fresh random inputs beside float64; *error of bound*: the worst error as a part of "
            "what float32 sums may err; rows and tokens alone and in company, bit for bit; QSpec "
            "on `tiny` beside plain decoding. Products of 8- and 4-bit activations failed beside "
            "activations that XLA had quantized on the GPU, where it approximates a reciprocal and "
            "so rounds some values to the next step. The check quantizes on the CPU since; it has "
            "not been repeated.", gpu_tables.checked),
    Section("gpu_check", "gpu_speed", "Kernels on a GPU: speed",
            "Attention with Llama-3-8B's heads, and some of its layers, beside the device's "
            "measured limits. Microseconds with a launch that prepares x.", gpu_tables.timed),
    Section("kernels.sampling", "sampling", "Choosing a token", "Milliseconds."),
    Section("kernels.compile_check_tpu", "compile_check_tpu*", "Kernels compiled for TPUs",
            "Compiled without a device; none has run on one.", _compiled),
    Section("quality.acceptance", "*acceptance", "Acceptance on real text",
            "SmolLM2-135M-Instruct. *gguf*: the model as its file has it; *bfloat16*: the same, "
            "dequantized. Its weights lie on a 4-bit grid in groups of 32, which flatters the "
            "INT4 cast with groups of 32. In brackets: 95 % intervals over prompts.", _accepted),
    Section("quality.memory_tokens", "*memory_tokens", "A memory of texts",
            "SmolLM2; up to 7 drafts per pass of the target."),
    Section("quality.schemes", "*schemes*", "Quantization schemes",
            "*ppl*: perplexity by activation precision; *accepted*: token acceptance of drafts.",
            apart=True),
    Section("quality.compression", "compression*", "Drafts without a model",
            "Tokens per verification of `tiny`. *drafted*: tokens proposed per verification; "
            "*error*: standard error of the mean, from seed to seed; *draft passes*: passes of the "
            "drafting model per token.", _compression),
    Section("quality.refinement", "refinement", "Refinement of a corpus",
            "Tokens that a look-up gains, by the part of a corpus that is kept."),
    Section("quality.evaluation", "*evaluation*", "Evaluation",
            "Beside a score: its items, and half of its 95 % interval.", _by_part, apart=True),
    Section("memory.footprint", "footprint", "Decoding, against the cache's capacity"),
    Section("memory.convert_1b", "convert_1b", "Conversion of a billion parameters"),
    Section("memory.quantize_1b", "quantize_1b", "Quantization of a billion parameters"),
    Section("memory.parallel", "parallel", "Many devices",
            "Virtual devices of one CPU: bytes and bits, not speed.", _parallel),
)  # fmt: skip
