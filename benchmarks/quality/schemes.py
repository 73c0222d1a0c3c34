"""Measures every quantization scheme on one real model: perplexity, and QSpec's acceptance.

Each method quantizes the 16-bit model in memory, on calibration text that is not measured. A model
that is quantized already is measured as it is ("as loaded"), and then dequantized for the methods.
Perplexity is measured on WikiText-2's validation text at each activation precision. Acceptance is
measured with greedy drafts of three tokens on real prompts. Every output of QSpec is compared with
plain decoding's, at every requested cache precision.

`--like-the-text` calibrates on the end of the same text, which is not measured either: it shows how
much a method depends on the kind of text that it is calibrated on.

For a model without a tokenizer, `--own-text` samples all three texts from the 16-bit model. On
average no other model has a lower perplexity on such text.

    python -m benchmarks.quality.schemes --model tiny-16bit --json OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write
from checkpoints_tools.quantization.calibration import calibration_tokens
from checkpoints_tools.quantization.recipe import Recipe
from specjax.evaluation import perplexity

# Name, method and options of `specjax.quantize`.
SCHEMES: list[tuple[str, str, dict[str, Any]]] = [
    ("INT8", "int8", {}),
    ("INT8 g32", "int8", {"group_size": 32}),
    ("8 = 4 + 4 bits", "nested8", {}),
    ("8 = 4 + 4 bits g32", "nested8", {"group_size": 32}),
    ("INT4 g128, RTN", "rtn", {}),
    ("INT4 g32, RTN", "rtn", {"group_size": 32}),
    ("INT4 per channel, RTN", "rtn", {"group_size": None}),
    ("INT4 g128, clipped", "rtn-clip", {}),
    ("INT4 g128, GPTQ", "gptq", {}),
    ("INT4 g128, GPTQ, clipped", "gptq-clip", {}),
    ("INT4 g128, GPTQ, act-order", "act-order+gptq", {}),
    ("INT4 g128, AWQ", "awq", {}),
    ("INT4 g128, AWQ + GPTQ", "awq+gptq", {}),
    ("INT4 g128, Atom", "atom", {}),
    ("INT4 g128, Atom + GPTQ", "atom+gptq", {}),
    ("INT4 g128, QuaRot", "quarot", {}),
    ("INT4 g128, QuaRot + GPTQ", "quarot+gptq", {}),
    ("INT4 per channel, QuaRot + GPTQ", "quarot+gptq", {"group_size": None}),
    ("INT4 per channel, QuaRot + GPTQ, clipped", "quarot+gptq-clip", {"group_size": None}),
    ("MXFP4 (floor)", "mxfp4", {}),
    ("MXFP4 (even)", "mxfp4-even", {}),
    ("INT3 g128, RTN", "rtn", {"bits": 3}),
    ("INT3 g128, GPTQ", "gptq", {"bits": 3}),
    ("INT2 g128, RTN", "rtn", {"bits": 2}),
    ("INT2 g128, GPTQ", "gptq", {"bits": 2}),
]
KINDS = ("arithmetic", "python", "prose")
ACTIVATIONS = ("a16", "a8", "a4")
COLUMNS = (
    "scheme", "ppl a16", "ppl a8", "ppl a4", "accepted a8", "accepted a4", "outputs", "identical",
)  # fmt: skip


def main() -> int:
    options = _options()
    loaded = specjax.load(options.model)
    model = specjax.dequantize(loaded)
    text, calibration, prompts = (_own_text if options.own_text else _texts)(model, options)
    chosen = [each for each in SCHEMES if options.only is None or each[0] in options.only]
    rows = [_measure("16 bits", model, text, [], options)]
    if loaded.quantized:
        rows.append(_measure("as loaded", loaded, text, prompts, options))
    for name, method, settings in tqdm(chosen, file=sys.stderr):
        needed = Recipe(method, **settings).needs_calibration
        params = specjax.quantize(
            model, method, calibration=calibration if needed else None, **settings
        )
        rows.append(_measure(name, params, text, prompts, options))
        print(table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    print("\n" + table(rows, COLUMNS))
    label = options.label or Path(options.model).name
    write(options.json, [{"model": label, **row} for row in rows])
    different = sum(row["outputs"] - row["identical"] for row in rows)
    print(f"\n{sum(row['outputs'] for row in rows)} outputs compared, {different} differ")
    return 1 if different else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny-16bit", help="a model in 16 bits, or smollm2")
    add("--label", help="the model's name in the result")
    add("--own-text", action="store_true", help="text sampled from the model itself")
    add("--like-the-text", action="store_true", help="calibrate on the end of the measured text")
    add("--only", nargs="+", choices=[name for name, *_ in SCHEMES], help="some schemes")
    add("--tokens", type=int, default=16384, help="tokens of the text for the perplexity")
    add("--window", type=int, default=512)
    add("--prompts", type=int, default=8, help="prompts per kind of text")
    add("--max-prompt", type=int, default=128, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=64)
    add("--draft-length", type=int, default=3)
    add("--cache-bits", type=int, nargs="+", default=[16, 8, 4])
    return parse.parse_args()


def _texts(model: specjax.Params, options: Any) -> tuple[list[int], np.ndarray, list[list[int]]]:
    """WikiText-2, calibration text int32[S, T] from other sources, and real prompts."""
    tokenizer = specjax.load_tokenizer(options.model)
    text = tokenizer.encode((options.data / "texts" / "wikitext2_valid.txt").read_text())
    prompts = [
        tokenizer.encode(each)[: options.max_prompt]
        for kind in KINDS
        for each in text_prompts(options.data, kind, options.prompts)
    ]
    if options.like_the_text:
        return text, np.array(text[-16 * 512 :], np.int32).reshape(16, 512), prompts
    return text, _calibration(options, tokenizer), prompts


def _own_text(model: specjax.Params, options: Any) -> tuple[list[int], np.ndarray, list[list[int]]]:
    """The same three, from windows and beginnings of texts that the model samples."""
    counts = -(-options.tokens // options.window), 16, len(KINDS) * options.prompts
    start = np.full((sum(counts), 1), model.config.bos_id, np.int32)
    sampled = specjax.decode(
        model, start, max_new_tokens=options.window - 1, drafter=specjax.Autoregressive(),
        sampling=specjax.Sampling(), key=jax.random.key(0), stop_tokens=(),
    )  # fmt: skip
    text, calibration, others = np.split(np.asarray(sampled.tokens), np.cumsum(counts)[:-1])
    prompts = [row[: 8 + i % (options.max_prompt - 7)].tolist() for i, row in enumerate(others)]
    return text.ravel().tolist(), calibration, prompts


def _calibration(options: Any, tokenizer: Any) -> np.ndarray:
    """16 sequences of 512 tokens: tales, and prompts that are not decoded."""
    tales = (options.data / "texts" / "GrimmsFairyTales.txt").read_text()[:100_000]
    others = [
        "\n\n".join(text_prompts(options.data, kind, options.prompts + 40)[options.prompts :])
        for kind in KINDS[:2]
    ]
    return calibration_tokens("\n\n".join((tales, *others)), tokenizer)


def _measure(
    name: str, params: specjax.Params, text: list[int], prompts: list[list[int]], options: Any
) -> dict[str, Any]:
    quantized = bool(prompts)
    row: dict[str, Any] = {"scheme": name, "bytes": params.nbytes}
    for activation in ACTIVATIONS if quantized else ("a16",):
        result = perplexity(
            params, text[: options.tokens], window=options.window, rows=4, activation=activation
        )
        row[f"ppl {activation}"] = result.perplexity
    row |= {"outputs": 0, "identical": 0}
    for bits in options.cache_bits if quantized else ():
        _compare(params, prompts, bits, options, row)
    return row


def _compare(
    params: specjax.Params, prompts: list[list[int]], bits: int, options: Any, row: dict[str, Any]
) -> None:
    """Decodes with and without drafts. Adds the counts, and the acceptance with a 16-bit cache."""
    tokens, lengths = pad(prompts, max(map(len, prompts)))

    def run(drafter: specjax.Drafter) -> specjax.DecodeResult:
        return specjax.decode(
            params, tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
            max_new_tokens=options.max_new_tokens, cache_bits=bits,
        )  # fmt: skip

    plain = np.asarray(run(specjax.Autoregressive()).tokens)
    for activation in ACTIVATIONS[1:]:
        result = run(specjax.QSpec(draft_length=options.draft_length, activation=activation))
        same = (np.asarray(result.tokens) == plain).all(axis=1)
        row["outputs"] += len(same)
        row["identical"] += int(same.sum())
        suffix = "" if bits == 16 else f", {bits}-bit cache"
        row[f"accepted {activation}{suffix}"] = float(result.stats.token_acceptance)


if __name__ == "__main__":
    sys.exit(main())
