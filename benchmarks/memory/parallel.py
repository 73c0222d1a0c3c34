"""Compares one model on one device and over meshes: outputs, bytes per device, collectives, speed.

The devices are the machine's own, or virtual devices of its CPU. Virtual devices share the cores
and the memory, so they show equal outputs, bytes and collectives, but no gain in speed. The model
is a checkpoint, or random 4-bit weights with eight key-value heads.

    python -m benchmarks.memory.parallel --json OUT
"""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.support.common import parser, table, write
from benchmarks.support.random_layers import random_layers
from pallas_kernels.formats import plain_weight
from specjax.generation.decoding import start
from specjax.model.layers import Linear

MESHES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4))
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
ITEM_BYTES = {"pred": 1, "u8": 1, "s8": 1, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a checkpoint; default: random weights")
    parse.add_argument("--virtual", type=int, default=8, help="virtual devices of the CPU")
    parse.add_argument("--rows", type=int, default=4)
    parse.add_argument("--max-new-tokens", type=int, default=64)
    options = parse.parse_args()
    jax.config.update("jax_num_cpu_devices", options.virtual)
    params = specjax.load(options.model) if options.model else random_model()
    width = 32
    vocabulary = params.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, (options.rows, width))
    rows: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    expected, seconds = decode(params, prompt, options.max_new_tokens)
    generated = int(jnp.sum(expected.lengths)) - prompt.size
    for data, tensor in MESHES:
        if data * tensor > len(jax.devices()) or params.config.num_kv_heads % tensor:
            continue
        mesh = specjax.parallel.mesh(data, tensor)
        divided = specjax.parallel.shard(params, mesh)
        result, own_seconds = decode(divided, prompt, options.max_new_tokens)
        state = start(divided, prompt, max_new_tokens=options.max_new_tokens)
        rows.append({
            "data": data, "tensor": tensor,
            "equal": np.array_equal(result.tokens, expected.tokens),
            "weights_per_device": max(device_bytes(divided).values()),
            "weights": params.nbytes,
            "cache_per_device": max(device_bytes(state.cache).values()),
            "tokens_per_second": generated / own_seconds,
            "one_device_tokens_per_second": generated / seconds,
        })  # fmt: skip
        for collective, count in collectives(divided, prompt, options.max_new_tokens).items():
            moved.append({"data": data, "tensor": tensor, "count": count, **dict(collective)})
    print(table(rows, list(rows[0])))
    print()
    print(table(moved, ["data", "tensor", "kind", "array", "bytes", "count"]))
    write(options.json, [*rows, *moved])


def random_model() -> specjax.Params:
    """Four layers in the shape of a small Llama: 4 bits, eight key-value heads."""
    config = specjax.ModelConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_layers=4, num_heads=16,
        num_kv_heads=8, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    layers = random_layers(rng, config)
    shape = config.vocab_size, config.hidden_size
    embedding, head = (
        plain_weight(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)) for _ in "eh"
    )
    norm = jnp.ones(config.hidden_size, jnp.bfloat16)
    return specjax.Params(embedding, layers, norm, Linear(head), config)


def decode(
    params: specjax.Params, prompt: np.ndarray, new: int
) -> tuple[specjax.DecodeResult, float]:
    """QSpec's output for the prompts, and the seconds of the second call."""
    for _ in range(2):
        begin = time.perf_counter()
        result = jax.block_until_ready(
            specjax.decode(
                params, prompt, max_new_tokens=new, drafter=specjax.QSpec(), stop_tokens=()
            )
        )
        seconds = time.perf_counter() - begin
    return result, seconds


def device_bytes(tree: Any) -> Counter[jax.Device]:
    """Bytes of the arrays on every device."""
    held: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(tree):
        for part in leaf.addressable_shards:
            held[part.device] += part.data.nbytes
    return held


def collectives(
    params: specjax.Params, prompt: np.ndarray, new: int, **options: Any
) -> Counter[tuple[tuple[str, Any], ...]]:
    """The collectives in QSpec's compiled program: kind, resulting array and its bytes."""
    program = jax.jit(specjax.decode, static_argnames="max_new_tokens")
    options = {"max_new_tokens": new, "drafter": specjax.QSpec(), **options}
    text = program.lower(params, prompt, **options).compile().as_text()
    found: Counter[tuple[tuple[str, Any], ...]] = Counter()
    # An instruction reads "%name = bf16[2,8]{1,0} all-gather(…)"; several results are in brackets.
    for results, kind in re.findall(rf"= (\(?.*?\)?) ({COLLECTIVES})(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            size = int(np.prod([int(n) for n in shape.split(",") if n]))
            array = f"{dtype}[{shape}]"
            size *= ITEM_BYTES.get(dtype, 4)
            found[(("kind", kind), ("array", array), ("bytes", size))] += 1
    return found


if __name__ == "__main__":
    main()
