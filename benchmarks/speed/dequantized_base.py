"""Times QSpec beside two bases: our own plain decoding, and one that dequantizes weights first.

The QSpec paper's base is a W4A16 system. Ours multiplies 4-bit weights as they are. A simpler one
writes each matrix out in bfloat16 at every pass, and multiplies that. No program decodes so here:
its time is that of plain decoding in bfloat16 and, for every pass, of dequantizing all matrices. A
speed-up over such a base says little of what drafts gain, and much of what the base loses.

SmolLM2 answers real prompts greedily, reading included; all programs take turns. *speedup* is over
our plain decoding and counts; *over dequantizing* is over the other base. Both are geometric means
over batches, the first with its 95 % interval.

    python -m benchmarks.speed.dequantized_base --batch 1 8 16 --json OUT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import pad, parser, table, write
from benchmarks.support.instruct import MODEL, prompts, target
from pallas_kernels.interleave import by_rows
from pallas_kernels.weight_values import dequantize
from pallas_kernels.weights import Rounded, is_format
from specjax.bench.turns import geometric_mean, take_turns
from specjax.model.params import unstack_layers

PLAIN, WRITE, WIDE = "plain", "all matrices written out", "plain in bfloat16"
DRAFTERS = {
    PLAIN: specjax.Autoregressive(),
    "QSpec(3) a8": specjax.QSpec(3, "a8"),
    "Auto": specjax.Auto(),
}
Chunk = tuple[np.ndarray, np.ndarray]  # prompts, their lengths


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        rows += _measured(batch, options)
        write(options.json, rows)
    print(table(rows, list(rows[0])))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--batch", type=int, nargs="+", default=[1, 8, 16])
    add("--prompts", type=int, default=8, help="prompts per kind")
    add("--longest", type=int, default=96, help="longer prompts are left out")
    add("--max-new-tokens", type=int, default=64)
    return parse.parse_args()


def _measured(batch: int, options: Any) -> list[dict[str, Any]]:
    """The rows of one batch size."""
    asked = [ids for _, ids in prompts(options.data, options.prompts, options.longest)]
    chunks = [
        pad(asked[i : i + batch], options.longest) for i in range(0, len(asked) - batch + 1, batch)
    ]

    def decoder(
        weights: str, drafter: specjax.Drafter
    ) -> Callable[[Chunk], specjax.DecodeResult | jax.Array]:
        def decode(chunk: Chunk) -> specjax.DecodeResult:
            tokens, lengths = chunk
            return specjax.decode(
                target(weights), tokens, prompt_lengths=lengths, drafter=drafter, stop_tokens=(),
                max_new_tokens=options.max_new_tokens,
            )  # fmt: skip

        return decode

    programs = {name: decoder("gguf", drafter) for name, drafter in DRAFTERS.items()}
    programs[WIDE] = decoder("bfloat16", specjax.Autoregressive())
    stored = _stored(target("gguf"))
    programs[WRITE] = lambda _: _written_out(stored)
    for program in programs.values():  # compiles them
        jax.block_until_ready(program(chunks[0]))
    found, _ = take_turns(programs, chunks)
    seconds = {name: each[0] for name, each in found.items()}
    passes = options.max_new_tokens + 1  # that of the prompt too
    first = seconds[WIDE] + passes * seconds[WRITE]
    times = {name: seconds[name] for name in DRAFTERS} | {"plain, dequantizing first": first}
    return [_row(name, batch, times, first, options) for name in times]


def _row(
    name: str, batch: int, times: dict[str, np.ndarray], first: np.ndarray, options: Any
) -> dict[str, Any]:
    speedup = geometric_mean(times[PLAIN] / times[name])
    count = batch * len(first)
    return {
        "model": MODEL, "target": "gguf", "drafter": name, "batch": batch, "prompts": count,
        "speedup": speedup.mean, "speedup_low": speedup.low, "speedup_high": speedup.high,
        "over_dequantizing": geometric_mean(first / times[name]).mean,
        "tokens_per_second": count * options.max_new_tokens / float(times[name].sum()),
    }  # fmt: skip


def _stored(params: specjax.Params) -> list[Rounded]:
    """All quantized matrices of a model, row by row."""
    leaves = jax.tree.leaves(unstack_layers(params), is_leaf=is_format)
    return [by_rows(leaf) for leaf in leaves if isinstance(leaf, Rounded)]


@jax.jit
def _written_out(weights: list[Rounded]) -> list[jax.Array]:
    return [dequantize(weight).astype(jnp.bfloat16) for weight in weights]


if __name__ == "__main__":
    main()
