"""Compiles the Hopper kernels for sm_90a without a GPU and prints what ptxas says of each.

    python -m benchmarks.compile_check_gpu --json result.json

Lowering alone, as in the tests, accepts kernels that the GPU's own compiler refuses, and says
nothing of registers. This needs packages that hold no GPU but its compiler, of jax's own version:

    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm

The layers are Llama-3-8B's. Exit status 1 where a thread's values spill from its registers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import mosaic_gpu
from pallas_kernels.formats import Int4Weight, Mxfp4Weight
from pallas_kernels.mosaic_gpu.quantized_matmul import make_plan

LAYERS = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256))  # K, N
ROWS = (1, 16, 64, 128)
FORMATS = ("int4 g128", "int4 g128 zeros", "int4 g64 zeros", "int4 g32", "int4 None", "mxfp4")
ACTIVATIONS = ("a16", "a8")  # "a4" is the same program as "a8"
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
    """What became of one kernel; spills are stores and loads, shared memory is dynamic."""

    kernel: str
    m: int
    k: int
    n: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool  # whether ptxas found too few registers to keep products in flight


def cases() -> Iterator[tuple[str, str, int, int, int]]:
    """(format, activation, M, K, N): the default format on every layer, the others on one."""
    for name in FORMATS:
        for k, n in LAYERS if name == FORMATS[0] else LAYERS[:1]:
            for activation in ACTIVATIONS:
                for m in ROWS:
                    yield name, activation, m, k, n


def weight_shapes(name: str, n: int, k: int) -> Int4Weight | Mxfp4Weight:
    """A weight of the named format whose arrays are shapes. K is a multiple of 256."""
    packed = jax.ShapeDtypeStruct((n, k // 2), jnp.uint8)
    kind, *rest = name.split()
    if kind == "mxfp4":
        return Mxfp4Weight(packed, jax.ShapeDtypeStruct((n, k // 32), jnp.uint8), k)
    group_size = None if rest[0] == "None" else int(rest[0][1:])
    groups = n, k // (group_size or k)
    zeros = jax.ShapeDtypeStruct(groups, jnp.int8) if "zeros" in rest else None
    return Int4Weight(packed, jax.ShapeDtypeStruct(groups, jnp.bfloat16), k, group_size, zeros)


def check(device: jax.Device, name: str, activation: str, m: int, k: int, n: int) -> Compiled:
    """Compiles one kernel for `device`."""
    weight, x = weight_shapes(name, n, k), jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    sharding = SingleDeviceSharding(device)
    function = jax.jit(
        lambda x, weight: mosaic_gpu.matmul(x, weight, activation),
        in_shardings=sharding,
        out_shardings=sharding,
    )
    lowered = function.trace(x, weight).lower(lowering_platforms=("cuda",))
    said = _output(lowered.compile)
    plan = make_plan(m, weight, activation)
    return Compiled(
        f"{name} {activation}", m, k, n,
        max(_numbers(r"Used (\d+) registers", said)),
        sum(_numbers(r"(\d+) bytes spill (?:stores|loads)(?:$|, \d+ bytes spill loads$)", said)),
        plan.stages * plan.stage_bytes,
        "are serialized" in said,
    )  # fmt: skip


def _numbers(pattern: str, text: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, text, re.MULTILINE)]
    if not found:
        raise RuntimeError(f"ptxas said nothing like {pattern!r}: {text!r}")
    return found


def _output(function: Callable[[], object]) -> str:
    """What a call writes to the process's output and error output, from C++ too."""
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
    """Prints the table; 1 where a kernel spills, 2 where the compiler is not installed."""
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
    for case in cases():
        found.append(check(topology.devices[0], *case))
        print("| " + " | ".join(map(str, dataclasses.astuple(found[-1]))) + " |", flush=True)
    if arguments.json:
        table = [dataclasses.asdict(row) for row in found]
        result = {"jax": jax.__version__, "target": "sm_90a", "kernels": table}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row.spill_bytes for row in found))


if __name__ == "__main__":
    sys.exit(main())
