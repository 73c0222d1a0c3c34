"""Compares drafters' outputs with plain decoding's bit for bit, and counts accepted drafts.

QSpec decodes the same real prompts with every combination of draft length and draft activation.
Each output is compared with that of `Autoregressive()`. Acceptance is reported per kind of text,
with the draft's cache entries overwritten and (`--ablation`) kept, as in table 2 of the paper.

    python -m benchmarks.exactness.outputs --model tiny --batch 8 --json OUT

With `--draft`, a small model of the same tokenizer, the script compares all drafters of
`benchmarks.support.drafter_table` for a 16-bit target.

    python -m benchmarks.exactness.outputs --model tiny-16bit --draft DIRECTORY --json OUT
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write
from benchmarks.support.drafter_table import model_drafters
from pallas_kernels.formats import Int4Weight
from specjax import LayerSkip

KINDS = ("arithmetic", "python", "prose")
Named = tuple[dict[str, Any], specjax.Drafter]  # its fields in the result, and the drafter


def main() -> int:
    options = _options()
    params = specjax.load(options.model)
    if options.draft is None and not isinstance(params.layers[0].q.weight, Int4Weight):
        params = specjax.quantize(params)
    drafters = list(_drafters(options, params))
    prompts = _prompts(options, params)
    rows = []
    for batch in options.batch:
        rows += _compare(params, drafters, prompts, batch, options)
    print(table(rows, list(rows[0])))
    label = options.label or Path(options.model).name
    write(options.json, [{"model": label, **row} for row in rows])
    different = sum(row["prompts"] - row["identical"] for row in rows)
    print(f"\n{sum(row['prompts'] for row in rows)} outputs compared, {different} differ")
    return 1 if different else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny", help="a bundled model, or a directory")
    add("--label", help="the model's name in the result")
    add("--draft", help="a small model of the same tokenizer: compare drafters of a 16-bit target")
    add("--own-prompts", action="store_true", help="prompts sampled from the model itself")
    add("--prompts", type=int, default=36, help="prompts per kind")
    add("--max-prompt", type=int, default=192, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=128)
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--draft-length", type=int, nargs="+", default=list(range(1, 9)))
    add("--activation", nargs="+", default=["a8", "a4"])
    add("--ablation", action="store_true", help="also measure without overwriting")
    return parse.parse_args()


def _prompts(options: Any, params: specjax.Params) -> list[tuple[str, list[int]]]:
    """Pairs of kind and token ids."""
    if options.own_prompts:
        return [("own", ids) for ids in _own_prompts(params, 3 * options.prompts)]
    tokenizer = specjax.load_tokenizer(options.model)
    return [
        (kind, tokenizer.encode(text)[: options.max_prompt])
        for kind in KINDS
        for text in text_prompts(options.data, kind, options.prompts)
    ]


def _own_prompts(params: specjax.Params, count: int) -> list[list[int]]:
    """Beginnings, 8 to 39 tokens long, of texts that the model samples."""
    first = params.config.bos_id if params.config.bos_id is not None else params.config.pad_id
    start = jnp.full((count, 1), first)
    sampled = specjax.decode(
        params, start, max_new_tokens=38, drafter=specjax.Autoregressive(),
        sampling=specjax.Sampling(temperature=0.9), key=jax.random.key(0), stop_tokens=(),
    )  # fmt: skip
    return [row[: 8 + i % 32].tolist() for i, row in enumerate(np.asarray(sampled.tokens))]


def _drafters(options: Any, params: specjax.Params) -> Iterator[Named]:
    if options.draft is not None:
        layers = tuple(i for i in range(params.config.num_layers) if i % 4 != 3)
        small = specjax.load(options.draft)
        for name, drafter in model_drafters(params, small, LayerSkip(layers)).items():
            yield {"drafter": name, "draft_length": drafter.draft_length}, drafter
        return
    kept_apart = (True, False) if options.ablation else (True,)
    for activation, length, overwrite in itertools.product(
        options.activation, options.draft_length, kept_apart
    ):
        fields = {"draft_length": length, "activation": activation, "overwrite": overwrite}
        yield fields, specjax.QSpec(**fields)


def _compare(
    params: specjax.Params,
    drafters: list[Named],
    prompts: list[tuple[str, list[int]]],
    batch: int,
    options: Any,
) -> list[dict[str, Any]]:
    """One row per drafter and kind of text."""
    width = max(len(ids) for _, ids in prompts)

    def run(drafter: specjax.Drafter) -> tuple[np.ndarray, specjax.Stats]:
        outputs = []
        for begin in range(0, len(prompts), batch):
            chunk = [ids for _, ids in prompts[begin : begin + batch]]
            tokens, lengths = pad(chunk + chunk[:1] * (batch - len(chunk)), width)
            result = specjax.decode(
                params, tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
                max_new_tokens=options.max_new_tokens,
            )  # fmt: skip
            outputs.append(jax.tree.map(lambda x: np.asarray(x)[: len(chunk)], result))  # noqa: B023
        merged = jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
        return merged.tokens, merged.stats

    plain, _ = run(specjax.Autoregressive())
    kinds = np.array([kind for kind, _ in prompts])
    rows = []
    for fields, drafter in tqdm(drafters, desc=f"batch {batch}", file=sys.stderr):
        tokens, stats = run(drafter)
        same = (tokens == plain).all(axis=1)
        for kind in dict.fromkeys(kinds):
            where = {"kind": str(kind), "batch": batch, **fields}
            rows.append(where | _counts(same[kinds == kind], stats, kinds == kind))
    return rows


def _counts(same: np.ndarray, stats: specjax.Stats, chosen: np.ndarray) -> dict[str, Any]:
    stats = jax.tree.map(lambda counts: counts[chosen], stats)
    return {
        "prompts": len(same),
        "identical": int(same.sum()),
        "acceptance_rate": float(stats.acceptance_rate),
        "token_acceptance": float(stats.token_acceptance),
        "tokens_per_round": float(stats.tokens_per_round),
    }


if __name__ == "__main__":
    sys.exit(main())
