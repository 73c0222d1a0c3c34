"""Compiles the TPU kernels for real TPUs without a TPU, and prints the compiler's numbers.

The compiler is in the `libtpu` package (`pip install libtpu`, in the version that `jax[tpu]` asks
for). The script compiles every weight format for the matrices of Llama-3.2-1B, Llama-3-8B and
Qwen2.5-7B, and attention with the heads of Llama-2-7B, Llama-3-8B and Qwen2.5-7B. A kernel fails if
it does not compile, or if it needs more VMEM than there is. Attention also fails if its program
copies the cache.

The columns are the VMEM that the kernel holds; the vector registers that the schedule spills; and
the cycles that the compiler schedules for one iteration of the matrix kernel's loop and for each
1024 weights of it, without waiting for memory. They are not measurements. For attention, M is T,
and K and N are the query and the key-value heads.

    python -m benchmarks.kernels.compile_check_tpu --json OUT
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from benchmarks.kernels.compile_check_gpu import attention_shapes
from benchmarks.support.common import table, write
from pallas_kernels import mosaic_tpu
from pallas_kernels.formats import (
    BLOCK,
    Bfloat16Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    padded_inputs,
)
from pallas_kernels.mosaic_tpu import quantized_matmul
from pallas_kernels.mosaic_tpu.decode import storage
from pallas_kernels.nested import NestedInt8Weight
from pallas_kernels.weights import Rounded

CHIPS = {"v5e": ("v5e:2x2", "TPU v5 lite"), "v6e": ("v6e:2x2", "TPU v6 lite"),
         "tpu7x": ("tpu7x:2x2x1", "TPU7x")}  # fmt: skip
MATRICES = {  # K, N
    "Llama-3.2-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)),
    "Llama-3-8B": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)),
    "Qwen2.5-7B": ((3584, 3584), (3584, 512), (3584, 18944), (18944, 3584)),
}
ROWS = (1, 8, 32, 128)
HEADS = ((32, 32), (32, 8), (28, 4))  # query and key-value heads of 128 features
TOKENS = (
    (1, False, None),
    (8, False, 4096),
    (48, True, None),
    (512, False, 4096),
)  # T, mask, window
FORMATS = (
    "int4",
    "int4 32",
    "int4 64",
    "int4 None",
    "int4 zeros",
    "mxfp4",
    "int8 128",
    "int8 None",
)
PRECISE = ("nested8 64", "bfloat16")  # "a16" only
COLUMNS = ("chip", "format", "activation", "M", "K", "N", "vmem_kib", "spills", "turn_cycles",
           "cycles_per_1024", "seconds", "error")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--quick", action="store_true", help="one matrix of every format")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    rows = []
    with _compiler_dumps() as dumps:
        for chip in options.chips:
            for row in _rows(dumps, chip, options.quick):
                rows.append(row)
                print(table([row], COLUMNS).splitlines()[-1], flush=True)
    failed = [row for row in rows if row["error"]]
    print(f"\n{table(failed or rows, COLUMNS)}\n\n{len(rows)} compiled, {len(failed)} failed")
    write(options.json, rows)
    sys.exit(1 if failed else 0)


@contextlib.contextmanager
def _compiler_dumps() -> Iterator[Path]:
    """A folder for the compiler's dumps. Call this before the compiler is loaded."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        yield Path(folder)


def _cases(quick: bool) -> Iterator[dict[str, Any]]:
    """The cases, which are compiled for every chip."""
    for name in (*FORMATS, *PRECISE):
        for activation in ("a16",) if name in PRECISE else ("a16", "a8"):
            for m, k, n in ((8, 4096, 14336), (128, 14336, 4096), (300, 172, 37))[
                : 1 if quick else 3
            ]:
                yield {"name": name, "activation": activation, "m": m, "k": k, "n": n}
    if quick:
        return
    for activation in ("a16", "a8"):
        yield {
            "name": "int4",
            "activation": activation,
            "m": 8,
            "k": 4096,
            "n": 4096,
            "whole": True,
        }
        for k, n in (matrix for matrices in MATRICES.values() for matrix in matrices):
            for m in ROWS:
                yield {"name": "int4", "activation": activation, "m": m, "k": k, "n": n}


def _rows(dumps: Path, chip: str, quick: bool) -> Iterator[dict[str, Any]]:
    """One line for every compilation for the chip."""
    for case in _cases(quick):
        whole = case.pop("whole", False)
        head = {"chip": chip, "format": case["name"], "activation": case["activation"]}
        head |= {"M": case["m"], "K": case["k"], "N": case["n"]}
        yield _attempt(head, partial(_check_matmul, dumps, chip, case, whole))
    for heads, kv_heads in HEADS[1:2] if quick else HEADS:
        for t, masked, window in TOKENS[:1] if quick else TOKENS:
            name = f"attention{' mask' * masked}{' window' * (window is not None)}"
            head = {"chip": chip, "format": name, "activation": "", "M": t, "K": heads}
            shapes = attention_shapes(2, t, heads, kv_heads, 128, 16, masked)
            check = partial(_check_attention, dumps, chip, shapes, window)
            yield _attempt(head | {"N": kv_heads}, check)


def _attempt(head: dict[str, Any], check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        row = head | check() | {"error": ""}
    except Exception as error:  # the script reports whatever the compiler raises
        row = head | {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    return row | {"seconds": round(time.perf_counter() - begin, 2)}


def _check_matmul(dumps: Path, chip: str, case: dict[str, Any], whole: bool) -> dict[str, Any]:
    """A product. `whole` includes the quantization of x before the kernel."""
    plain = case["name"] == "bfloat16"  # its kernel has no loop over blocks
    function, arguments = (_matmul if whole or plain else _kernel)(chip, **case)
    _compile(dumps, chip, function, *arguments)
    return {} if plain else _schedule(dumps, arguments[-1])


def _check_attention(
    dumps: Path, chip: str, shapes: tuple[Any, ...], window: int | None
) -> dict[str, Any]:
    cache = shapes[1].shape
    kernel = partial(mosaic_tpu.attention, window=window, sinks=4, head_scale=cache[-1] ** -0.5)
    text = _compile(dumps, chip, kernel, *shapes)
    dimensions = ",".join(map(str, cache))
    if re.search(rf"= u16\[{dimensions}\]\S* (copy|fusion)\(", text):
        raise RuntimeError("the program copies the cache")
    return _memory(*_dump(dumps))


def _matmul(
    chip: str, name: str, activation: str, m: int, k: int, n: int
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    return lambda x, weight: mosaic_tpu.matmul(x, weight, activation), (x, _weight(name, n, k))


def _kernel(
    chip: str, name: str, activation: str, m: int, k: int, n: int
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    weight = _weight(name, n, k)
    with _on(chip):
        int8 = activation != "a16" and quantized_matmul.multiplies_int8()
    inputs = padded_inputs(k)
    values = jax.ShapeDtypeStruct((m, inputs), jnp.int8 if int8 else jnp.bfloat16)
    group = jax.ShapeDtypeStruct((m, inputs // (weight.group_size or inputs)), jnp.float32)
    per_group = {} if activation == "a16" else {"x_scales": group}
    if name == "int4 zeros":
        per_group["x_sums"] = group
    return quantized_matmul.multiply, (values, per_group, weight)


def _weight(name: str, n: int, k: int) -> Any:
    """A weight with shapes for arrays. `name` is its format and, if not 128, its group size."""
    kind, _, detail = name.partition(" ")
    inputs = padded_inputs(k)
    if kind == "bfloat16":
        return Bfloat16Weight(jax.ShapeDtypeStruct((n, k), jnp.uint16))
    packed = jax.ShapeDtypeStruct((n, inputs // 2), jnp.uint8)
    if kind == "mxfp4":
        return Mxfp4Weight(packed, jax.ShapeDtypeStruct((n, inputs // 32), jnp.uint8), k)
    group_size = None if detail == "None" else int(detail) if detail.isdigit() else 128
    scales = jax.ShapeDtypeStruct((n, inputs // (group_size or inputs)), jnp.bfloat16)
    if kind == "int8":
        integers = jax.ShapeDtypeStruct((n, inputs), jnp.int8)
        return Int8Weight(integers, scales, k, group_size)
    if kind == "nested8":
        return NestedInt8Weight(packed, scales, packed, k, group_size)
    zeros = jax.ShapeDtypeStruct(scales.shape, jnp.int8) if detail == "zeros" else None
    return Int4Weight(packed, scales, k, group_size, zeros)


def _on(chip: str) -> AbstractContextManager[Any]:
    """A context that traces code for the chip."""
    device = AbstractDevice(CHIPS[chip][1], 1, "tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _compile(dumps: Path, chip: str, function: Callable[..., jax.Array], *arguments: Any) -> str:
    """The text of the compiled program. The compiler leaves its intermediate files in `dumps`."""
    for file in dumps.iterdir():
        file.unlink()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0])
    device = SingleDeviceSharding(topology.devices[0])
    with _on(chip):
        traced = jax.jit(function, in_shardings=device, out_shardings=device).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def _dump(dumps: Path) -> tuple[str, str]:
    """The dumped allocations and schedule of the kernel, the only program with scratch operands."""
    [original] = (
        path for path in dumps.glob("*-original.txt") if "'scratch operand'" in path.read_text()
    )
    program = original.name.rsplit("-", 2)[0]
    [bundles] = dumps.glob(f"{program}-*-final_bundles.txt")
    return original.read_text(), bundles.read_text()


def _memory(allocations: str, bundles: str) -> dict[str, Any]:
    sizes = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", allocations)
    return {
        "vmem_kib": sum(int(size, 16) for size in sizes) // 1024,
        "spills": len(re.findall(r"vst \[vmem:\[#allocation\d+_spill", bundles)),
    }


def _schedule(dumps: Path, weight: Rounded) -> dict[str, Any]:
    """The cycles of the matrix kernel's loop, from the compiler's dump."""
    allocations, bundles = _dump(dumps)
    turn = len(re.findall(r"^\s*0x[0-9a-f]+ .*?: >> ", bundles, re.MULTILINE))
    stored = storage(weight)["weights"].shape[1]
    found = re.search(rf"window shape is [us]8\[(\d+),{stored}\]", allocations)
    assert found is not None
    weights = quantized_matmul.BLOCKS_PER_TURN * BLOCK * int(found[1])
    loops = weight.shape[1] >= 2 * quantized_matmul.BLOCKS_PER_TURN * BLOCK
    return {
        **_memory(allocations, bundles),
        "turn_cycles": turn if loops else "",
        "cycles_per_1024": 1024 * turn / weights if loops else "",
    }


if __name__ == "__main__":
    main()
