"""Compiles the GPU kernels for sm_90a without a GPU and prints what ptxas reports for each.

    python -m benchmarks.kernels.compile_check_gpu --json result.json

Lowering alone, as in the tests, accepts kernels that the GPU's own compiler refuses, and reports
no registers. The script needs the compiler's packages, in the version of jax, and no GPU:

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm

The layers are Llama-3-8B's. The Triton kernels are one program for every layer, and for every M of
a tile, so one of each represents all. The exit status is 1 if a thread's values spill from its
registers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from benchmarks.support.common import write
from pallas_kernels import gpu_layers, mosaic_gpu, triton_gpu
from pallas_kernels.activations import Activation
from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import BLOCK_INPUTS, PALETTE, PALETTE_INPUTS, Bfloat12Weight
from pallas_kernels.cache_entries import empty_entries
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Int8Weight, Mxfp4Weight
from pallas_kernels.layers import Layers
from pallas_kernels.mosaic_gpu.quantized_matmul import make_plan
from pallas_kernels.triton_gpu.quantized_matmul import MOST_ROWS
from pallas_kernels.triton_gpu.segments import ROW_TILES

LAYERS = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256))  # K, N
TOGETHER = (4096, 4096, 1024, 1024)  # K, then N of queries, keys and values: one kernel
ROWS = (1, 16, 64, 128)
QUANTIZED_ROWS = tuple(rows for rows in ROW_TILES if rows <= MOST_ROWS)  # of Triton's kernel
FORMATS = ("int4 g128", "int4 g128 zeros", "int4 g64 zeros", "int4 g32", "int4 None", "mxfp4")
EXACT = ("bfloat16", "bfloat12")
ACTIVATIONS = ("a16", "a8")  # "a4" is the same program as "a8"
ATTENTION = (  # heads, key-value heads, features of one, bits of the cache
    *((32, 8, 128, bits) for bits in (16, 8, 4)),
    *((32, 8, 64, bits) for bits in (16, 8, 4)),
    (32, 32, 128, 16),
    (16, 8, 256, 16),
)
_ENTRY = r"\.entry (_kernel|_read_segment|_merge_segments|_add_and_norm)"  # Triton's kernels
TOKENS = (
    (1, False, None),
    (8, False, 4096),
    (48, True, None),
    (200, True, 4096),
)  # T, mask, window
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result for one kernel. Spills count stores and loads; shared memory is dynamic."""

    kernel: str
    sizes: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool  # ptxas had too few registers to keep products in flight


def checks(device: jax.Device) -> Iterator[Compiled]:
    """Compiles every kernel for `device`: the default format on every layer, others on one."""
    for name in FORMATS:
        for k, n in LAYERS if name == FORMATS[0] else LAYERS[:1]:
            for activation in ACTIVATIONS:
                for m in ROWS:
                    yield check_hopper(device, name, activation, m, k, n)
    for name, activation, m in product(FORMATS, ACTIVATIONS, ROWS):
        yield check_hopper(device, name, activation, m, *TOGETHER)
    for name, activation, m in product(
        (*FORMATS, "int8 g128", "int8 None"), ACTIVATIONS, QUANTIZED_ROWS
    ):
        yield check_matmul(device, name, activation, m, *LAYERS[0])
    for name, m in product(EXACT, ROWS):
        yield check_matmul(device, name, "a16", m, *LAYERS[0])
    for heads, kv_heads, e, bits in ATTENTION:
        for t, masked, window in TOKENS:
            yield check_attention(device, t, heads, kv_heads, e, bits, masked, window)
    for name, activation in (("bfloat16", "a16"), ("int4 g128", "a16"), ("int4 g128", "a8")):
        yield check_layers(device, name, activation)


def weight_shapes(name: str, n: int, k: int) -> Any:
    """A weight of the named format with shapes for arrays. K is a multiple of 256."""
    if name == "bfloat16":
        return Bfloat16Weight(jax.ShapeDtypeStruct((n, k), jnp.uint16))
    if name == "bfloat12":
        tiles = n // TILE
        return Bfloat12Weight(
            jax.ShapeDtypeStruct((tiles, 3 * k // BLOCK_INPUTS, 4 * TILE), jnp.uint8),
            jax.ShapeDtypeStruct((tiles, k // PALETTE_INPUTS, PALETTE), jnp.uint8),
            jax.ShapeDtypeStruct((tiles, 40), jnp.uint32),
            k,
        )
    packed = jax.ShapeDtypeStruct((n, k // 2), jnp.uint8)
    kind, *rest = name.split()
    if kind == "mxfp4":
        return Mxfp4Weight(packed, jax.ShapeDtypeStruct((n, k // 32), jnp.uint8), k)
    group_size = None if rest[0] == "None" else int(rest[0][1:])
    groups = n, k // (group_size or k)
    scales = jax.ShapeDtypeStruct(groups, jnp.bfloat16)
    if kind == "int8":
        return Int8Weight(jax.ShapeDtypeStruct((n, k), jnp.int8), scales, k, group_size)
    zeros = jax.ShapeDtypeStruct(groups, jnp.int8) if "zeros" in rest else None
    return Int4Weight(packed, scales, k, group_size, zeros)


def check_hopper(
    device: jax.Device, name: str, activation: str, m: int, k: int, *outputs: int
) -> Compiled:
    """Compiles a Mosaic GPU kernel. Mosaic's compiler calls ptxas and prints its report."""
    weights = [weight_shapes(name, n, k) for n in outputs]
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    lowered = _lower(device, partial(mosaic_gpu.products, activation=activation), x, weights)
    said = _output(lowered.compile)
    plan = make_plan(m, weights, activation)
    shared, n = plan.stages * plan.stage_bytes, " + ".join(map(str, outputs))
    return _compiled(f"hopper {name} {activation}", f"M {m} K {k} N {n}", said, shared)


def check_matmul(
    device: jax.Device, name: str, activation: str, m: int, k: int, n: int
) -> Compiled:
    """Compiles the matrix kernel for all GPUs (Triton)."""
    weight, x = weight_shapes(name, n, k), jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    lowered = _lower(device, partial(triton_gpu.matmul, activation=activation), x, weight)
    return _compiled(f"{name} {activation}", f"M {m} K {k} N {n}", *_triton(lowered))


def check_attention(
    device: jax.Device,
    t: int,
    heads: int,
    kv_heads: int,
    e: int,
    bits: int,
    masked: bool,
    window: int | None,
) -> Compiled:
    """Compiles both kernels of attention; each number is the worse of the two.

    A window has sinks.
    """
    shapes = attention_shapes(2, t, heads, kv_heads, e, bits, masked)
    kernel = partial(triton_gpu.attention, window=window, sinks=4, head_scale=e**-0.5)
    said, shared = _triton(_lower(device, kernel, *shapes))
    name = f"attention {bits} bits{' mask' * masked}{' window' * (window is not None)}"
    return _compiled(name, f"T {t} H {heads} K {kv_heads} E {e}", said, shared)


def check_layers(device: jax.Device, name: str, activation: Activation) -> Compiled:
    """Compiles layers of Llama-3.2-1B's shape: the kernels between products, and Triton's own."""
    count, d, f, heads, kv_heads, e = 2, 2048, 8192, 32, 8, 64
    outputs = (heads * e, d), (kv_heads * e, d), (kv_heads * e, d), (d, heads * e)
    linears = [weight_shapes(name, *shape) for shape in (*outputs, (f, d), (f, d), (d, f))]
    stacks = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct((count, *part.shape), part.dtype), linears
    )
    norm = jax.ShapeDtypeStruct((count, d), jnp.float32)

    def run(
        x: jax.Array, cached: Any, lengths: jax.Array, rope: Any, norm: jax.Array, stacks: Any
    ) -> Any:
        weights = Layers(norm, norm, None, None, stacks, [None] * 7, [activation] * 7)
        return gpu_layers.layers(
            x, *cached, lengths, lengths[:, None], rope, None, weights, numbers=(0, 1),
            windows=[None] * 2, sinks=[0] * 2, eps=1e-5, head_scale=e**-0.5,
        )  # fmt: skip

    x = jax.ShapeDtypeStruct((1, 1, d), jnp.bfloat16)
    cached = [jax.ShapeDtypeStruct((1, count, 1024, kv_heads, e), jnp.uint16)] * 2
    rope = (jax.ShapeDtypeStruct((1, 1, e // 2), jnp.float32),) * 2
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered, found = _lower(device, run, x, cached, lengths, rope, norm, stacks), []
    _output(lambda: found.append(_triton(lowered)))  # Mosaic's reports are those of its own rows
    said, shared = found[0]
    return _compiled(f"layers {name} {activation}", f"M 1 D {d} F {f}", said, shared)


def attention_shapes(
    rows: int, t: int, heads: int, kv_heads: int, e: int, bits: int, masked: bool
) -> tuple[Any, ...]:
    """The operands of attention over 4096 slots, as shapes, with a cache of `bits` bits."""
    entries = jax.eval_shape(lambda: empty_entries((rows, 4, 4096, kv_heads, e), "bfloat16", bits))
    mask = jax.ShapeDtypeStruct((rows, t, t), jnp.bool_) if masked else None
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (rows, t)))
    queries = jax.ShapeDtypeStruct((rows, t, heads, e), jnp.bfloat16)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return queries, entries, entries, *integers, mask, layer


def _lower(device: jax.Device, function: Callable[..., Any], *shapes: Any) -> Any:
    sharding = SingleDeviceSharding(device)
    function = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    with use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    ):
        return function.trace(*shapes).lower(lowering_platforms=("cuda",))


def _triton(lowered: Any) -> tuple[str, int]:
    """ptxas's report on the Pallas kernels that XLA's Triton compiles, and their shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": ".*"})
        texts = {path: path.read_text() for path in Path(folder).glob("*.ptx")}
        kernels = [path for path, text in texts.items() if re.search(_ENTRY, text)]
        said = "".join(
            subprocess.run(
                [_ptxas(), "--verbose", "--gpu-name=sm_90a", "--output-file=/dev/null", path],
                capture_output=True, text=True, check=True,
            ).stderr
            for path in kernels
        )  # fmt: skip
        shared = [
            int(size)
            for path in Path(folder).glob("*.triton-to-llvm.txt")
            for size in re.findall(r"ttg\.shared = (\d+)", path.read_text())
        ]
    return said, max(shared, default=0)


def _compiled(kernel: str, sizes: str, said: str, shared: int) -> Compiled:
    spilled = r"(\d+) bytes spill (?:stores|loads)(?:$|, \d+ bytes spill loads$)"
    return Compiled(
        kernel,
        sizes,
        max(_numbers(r"Used (\d+) registers", said)),
        sum(_numbers(spilled, said)),
        shared,
        "are serialized" in said,
    )


def _numbers(pattern: str, text: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, text, re.MULTILINE)]
    if not found:
        raise RuntimeError(f"ptxas did not report {pattern!r}: {text!r}")
    return found


def _ptxas() -> Path:
    """The ptxas of the package nvidia-cuda-nvcc."""
    specification = find_spec("nvidia")
    folders = specification.submodule_search_locations if specification else None
    return next(path for folder in folders or () for path in Path(folder).glob("*/bin/ptxas"))


def _output(function: Callable[[], object]) -> str:
    """Captures what a call writes to stdout and stderr, C++ included."""
    with tempfile.TemporaryFile() as file, _redirected(file.fileno()):
        function()
        file.seek(0)
        return file.read().decode()


@contextmanager
def _redirected(target: int) -> Iterator[None]:
    sys.stdout.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in saved:
            os.dup2(target, descriptor)
        yield
    finally:
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def main() -> int:
    """Prints the table. Returns 1 if a kernel spills, 2 if the compiler is not installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x1"
        )
    except Exception as error:
        print(f"no compiler for CUDA (see the head of {Path(__file__).name}): {error}")
        return 2
    columns = [field.name for field in dataclasses.fields(Compiled)]
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    found = []
    for row in checks(topology.devices[0]):
        found.append(row)
        print("| " + " | ".join(map(str, dataclasses.astuple(row))) + " |", flush=True)
    write(arguments.json, [dataclasses.asdict(row) for row in found])
    return int(any(row.spill_bytes for row in found))


if __name__ == "__main__":
    sys.exit(main())
