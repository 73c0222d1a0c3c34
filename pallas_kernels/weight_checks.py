"""Checks that the arrays of a weight have the shapes and dtypes of its format."""

from __future__ import annotations

import jax

from pallas_kernels.arrays import TILE
from pallas_kernels.bfloat12 import (
    BLOCK_INPUTS,
    MOST_INPUTS,
    PALETTE,
    PALETTE_INPUTS,
    Bfloat12Weight,
)
from pallas_kernels.formats import (
    SCALE_DTYPES,
    Bfloat16Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    check_group_size,
    check_one_offset,
    padded_inputs,
)
from pallas_kernels.nested import NestedInt8Weight, NestedWeight
from pallas_kernels.weights import Weight


def check_arrays(weight: Weight) -> None:
    """Raises ValueError unless the arrays of a weight, stored row by row, match its format."""
    if isinstance(weight, jax.Array):
        _check("a plain weight", weight, weight.shape, ("bfloat16", "float32"))
        return
    if isinstance(weight, Bfloat16Weight):
        _check("bits", weight.bits, weight.bits.shape[:2], ("uint16",))
        return
    if isinstance(weight, Bfloat12Weight):
        _check_bfloat12(weight)
        return
    if isinstance(weight, NestedWeight):
        _check_planes(weight)
        return
    n, k = weight.shape
    check_group_size(weight.group_size)
    inputs = padded_inputs(k)
    groups = inputs // (weight.group_size or inputs)
    if isinstance(weight, Int8Weight):
        _check("integers", weight.integers, (n, inputs), ("int8",))
    else:
        _check("packed", weight.packed, (n, inputs // 2), ("uint8",))
    if isinstance(weight, NestedInt8Weight):
        _check("rest", weight.rest, weight.packed.shape, ("uint8",))
    if isinstance(weight, Mxfp4Weight):
        _check("scales", weight.scales, (n, groups), ("uint8",))
        return
    _check("scales", weight.scales, (n, groups), SCALE_DTYPES)
    if isinstance(weight, NestedInt8Weight):
        return
    check_one_offset(weight.zeros, weight.minima)
    if weight.zeros is not None:
        _check("zeros", weight.zeros, (n, groups), ("int8",))
    if weight.minima is not None:
        _check("minima", weight.minima, (n, groups), (weight.scales.dtype.name,))
    if weight.order is not None:
        _check("order", weight.order, (k,), ("int32",))
    if isinstance(weight, Int8Weight) or weight.outliers is None:
        return
    if weight.minima is not None:
        raise ValueError("a weight with outliers must have no minima, got both")
    inner, columns = weight.outliers.weight, weight.outliers.columns
    check_arrays(inner)
    _check("columns", columns, (inner.shape[1],), ("int32",))
    if inner.shape[0] != n:
        raise ValueError(f"outliers must have {n} outputs, got {inner.shape[0]}")


def _check_planes(weight: NestedWeight) -> None:
    if not isinstance(weight.exact, Bfloat12Weight | Bfloat16Weight):
        raise ValueError(f"an exact plane must be bfloat16, got {type(weight.exact).__name__}")
    if not isinstance(weight.draft, Int4Weight | Mxfp4Weight):
        raise ValueError(f"a draft plane must have 4 bits, got {type(weight.draft).__name__}")
    if weight.exact.shape != weight.draft.shape:
        raise ValueError(
            f"both planes must be of one matrix, got {weight.exact.shape} and {weight.draft.shape}"
        )
    check_arrays(weight.exact)
    check_arrays(weight.draft)


def _check_bfloat12(weight: Bfloat12Weight) -> None:
    n, k = weight.shape
    if k > MOST_INPUTS:
        raise ValueError(f"a matrix in 12 bits must have at most {MOST_INPUTS} inputs, got {k}")
    tiles = -(-n // TILE)
    words = 3 * -(-k // BLOCK_INPUTS)
    _check("packed", weight.packed, (tiles, words, 4 * TILE), ("uint8",))
    palettes = (tiles, -(-k // PALETTE_INPUTS), PALETTE)
    _check("palettes", weight.palettes, palettes, ("uint8",))
    _check("escapes", weight.escapes, (tiles, *weight.escapes.shape[1:2]), ("uint32",))


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if array.shape != shape or array.dtype.name not in dtypes:
        raise ValueError(
            f"{name} must be {' or '.join(dtypes)}{list(shape)}, "
            f"got {array.dtype.name}{list(array.shape)}"
        )
