"""PyTorch's kernels, where installed, for the products of benchmarks/kernels/products.py.

On a CPU every product is a call from Python, some microseconds that our program of many products
does not have. On a GPU all products are one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import peers

try:
    import torch
except ImportError:  # an optional peer
    torch = None

Products = list[Callable[[], Any]]  # one per copy of the weight


def times(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    seconds: Callable[[Callable[[int], object], int], float],
    cache_bytes: float,
    *,
    device: str = "cpu",
    passes: int = 1,
) -> Iterator[tuple[str, float]]:
    """Yields (name, seconds per product) for PyTorch's counterparts of a kernel, if there are any.

    `seconds(function, calls)` is the time of one call; call i uses copy i of the weight. On
    device "cuda" one call is a graph of all copies' products, recorded `passes` times.
    """
    makers = {"w4a16": _int4, "w8a8": _int8, "w16a16": _bfloat16}
    if torch is None or kernel not in makers:
        return
    if device == "cuda" and (not torch.cuda.is_available() or (kernel == "w8a8" and rows <= 16)):
        return  # PyTorch's CUDA product of integers refuses few rows
    per_weight = {"w4a16": 0.5, "w8a8": 1, "w16a16": 2}[kernel] * n * k
    copies = max(2, int(cache_bytes // per_weight) + 1)
    with torch.device(device):
        name, products = makers[kernel](rows, n, k, copies)
    if device == "cpu":
        torch.set_num_threads(peers.CORES)
        yield name, seconds(lambda i: products[i](), copies)
    else:
        yield name, seconds(_graph(products * passes), 1) / (passes * copies)


def _graph(products: Products) -> Callable[[int], None]:
    """All products as one launch, so that Python's time is not measured."""
    for product in products[:3]:  # the setup of a first call must not be recorded
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()

    def replay(_: int) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def _int4(rows: int, n: int, k: int, copies: int) -> tuple[str, Products]:
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    scales = torch.rand(k // 128, n, 2).to(torch.bfloat16)
    op = torch.ops.aten
    if x.is_cuda:  # two codes per byte, tiled by 8 times 16 inputs
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        packed = [op._convert_weight_to_int4pack(pairs, 8) for _ in range(copies)]
        multiply = op._weight_int4pack_mm
    else:
        packed = [op._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(copies)]
        multiply = op._weight_int4pack_mm_for_cpu
    return "torch_int4pack", [lambda w=w: multiply(x, w, 128, scales) for w in packed]


def _int8(rows: int, n: int, k: int, copies: int) -> tuple[str, Products]:
    x = torch.randint(-127, 128, (rows, k), dtype=torch.int8)
    weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8).t() for _ in range(copies)]
    return "torch_int_mm", [lambda w=w: torch._int_mm(x, w) for w in weights]


def _bfloat16(rows: int, n: int, k: int, copies: int) -> tuple[str, Products]:
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    weights = [weight.clone() for _ in range(copies)]
    return "torch_bf16", [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
