"""Matrix products for TPUs as one Pallas kernel: any quantized weight times 16-, 8- or 4-bit x.

`pallas_kernels.reference` defines the result. Rounding differs in two places: "a16" rounds a
float32 x to bfloat16 for the matrix unit, and scales multiply group sums instead of weights. A
weight's integers are exact in int8 and in bfloat16, so precisions differ only in the dtype of x:

    a16      bfloat16 products, summed in float32, scaled by the weight's scales
    a8, a4   int8 products, summed in int32, scaled by both scales. Chips without int8 products (v4,
             7x) multiply bfloat16. Sums over 128 inputs are integers of at most
             128 · 128 · 128 < 2^24, so the result is the same.

The matrix unit loads 128 inputs at once, more than a group of 32 or 64. The kernel loads a plane of
128 inputs of the weight once and stacks copies of x, one per group, with zeros elsewhere.

Summation order: one product of 128 inputs within a group, then the groups, k ascending. Groups are
added in float32, or as integers if one scale serves all inputs. Both depend only on the weight's
shape. The tile size (`tiles.choose`) does not change a row's sums, so a row's bits do not depend on
M. This holds by construction for "a8" and "a4". For "a16" it relies on the matrix unit and on
Mosaic's `shape_invariant_numerics`, which is on by default. It has not been verified on a TPU.

Not implemented: tuned tiles, a prepacked layout, quantization of x inside the kernel, and an int8
conversion for v4, where the compiled schedule takes several times as many cycles as on later chips.
`pallas_kernels.matmul` adds outliers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.activations import Activation, quantize_activations
from pallas_kernels.formats import BLOCK, PLANE, Quantized, padded_inputs
from pallas_kernels.mosaic_tpu import tiles
from pallas_kernels.mosaic_tpu.decode import (
    above_smallest,
    decode_minima,
    decode_scales,
    decode_zeros,
    planes,
    shift,
    storage,
)
from pallas_kernels.operands import check, group_parts, group_sums, product_dtype
from pallas_kernels.weights import Rounded

Refs = dict[str, jax.Ref]  # a kernel's operands, or its scratch memory, by name

BLOCKS_PER_TURN = 4  # unrolled, so that the compiler can overlap their work
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The parameters of a call that are known at trace time."""

    kind: type[Rounded]
    group_size: int | None
    blocks: int  # of 256 inputs
    exact: bool  # products are integers

    @property
    def turn(self) -> int:
        """Blocks in one iteration of the loop."""
        return min(BLOCKS_PER_TURN, self.blocks)

    @property
    def width(self) -> int:
        """Inputs per product."""
        return self.group_size or PLANE

    @property
    def groups(self) -> int:
        return self.blocks * BLOCK // self.group_size if self.group_size else 1

    @property
    def groups_first(self) -> bool:
        """Whether XLA stores [N, groups] as [groups, N], which needs less padding."""
        return self.groups < tiles.LANES

    @property
    def groups_per_turn(self) -> int:
        return self.turn * (BLOCK // self.width)

    @property
    def total_dtype(self) -> np.dtype:
        """int32 for integer products under a single scale, else float32."""
        return np.dtype(np.int32 if self.exact and self.group_size is None else np.float32)


def matmul(
    x: jax.Array,
    weight: Rounded,
    activation: Activation = "a16",
    *,
    int8_products: bool | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes x · weightᵀ.

    Args:
      x: bf16 or f32[M, K].
      weight: [N, K].
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      int8_products: whether "a8" and "a4" multiply int8 instead of bfloat16. None lets the chip
        decide.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Returns:
      f32[M, N].

    Raises:
      ValueError: the kernel does not serve a shape or dtype.
    """
    check(x, weight, activation, Rounded if activation == "a16" else Quantized)
    x = jnp.pad(x, ((0, 0), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    if activation == "a16":
        values, per_group = x.astype(jnp.bfloat16), {}
    else:
        values, scales = quantize_activations(x.astype(jnp.float32), activation, weight.group_size)
        per_group = {"x_scales": scales}
    if group_parts(weight).keys() & {"zeros", "minima"}:
        per_group["x_sums"] = group_sums(values, weight.group_size)
    if int8_products is None:
        int8_products = multiplies_int8()
    if not int8_products:
        values = values.astype(jnp.bfloat16)
    return multiply(values, per_group, weight, interpret=interpret)


def multiplies_int8() -> bool:
    """Whether the target TPU multiplies int8. True if the target is not a TPU."""
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().int8_ops_per_second > 0


def multiply(
    values: jax.Array,
    per_group: dict[str, jax.Array],
    weight: Rounded,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel on a grid of M and N. A step reads all inputs of its outputs.

    Args:
      values: bf16 or int8[M, padded K].
      per_group: f32[M, groups] by name: "x_scales" if the values are integers, "x_sums" if the
        weight has zeros or minima.
      weight: [N, K].
      interpret: as in `matmul`.

    Returns:
      f32[M, N].
    """
    m, n = values.shape[0], weight.shape[0]
    plan = _Plan(type(weight), weight.group_size, values.shape[1] // BLOCK, "x_scales" in per_group)
    tile = _tiles(values, len(per_group), weight, plan)
    rows = tile.rows if tile.count > 1 else -(-m // 8) * 8  # whole registers of results
    refs, specs = _operands(values, per_group, weight, plan, tile)
    scratch = {"total": pltpu.VMEM((rows, tile.columns), plan.total_dtype)}
    for name in _per_output(weight):
        scratch[name] = pltpu.VMEM((plan.groups, tile.columns), jnp.float32)
    y: jax.Array = pl.pallas_call(
        lambda refs, y, **scratch: _kernel(refs, y, scratch, plan),
        grid=(tile.count, pl.cdiv(n, tile.columns)),
        in_specs=[specs],
        out_specs=pl.BlockSpec((rows, tile.columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((tile.count * rows, n), jnp.float32),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(refs)
    return y[:m]


def _tiles(values: jax.Array, per_group: int, weight: Rounded, plan: _Plan) -> tiles.Tiles:
    """The tiles for values: bf16 or int8[M, K] and `per_group` arrays with a value per group."""
    m, k = values.shape
    turns = 1 if plan.group_size is None else pl.cdiv(plan.blocks, plan.turn)
    return tiles.choose(
        m,
        weight.shape[0],
        weight_bytes=sum(array.shape[1] for array in storage(weight).values()),
        row_bytes=k * values.dtype.itemsize + per_group * turns * tiles.LANES * 4,
        packing=32 // values.dtype.itemsize,
        groups_per_plane=PLANE // plan.width if plan.group_size else 1,
    )


def _operands(
    values: jax.Array,
    per_group: dict[str, jax.Array],
    weight: Rounded,
    plan: _Plan,
    tile: tiles.Tiles,
) -> tuple[dict[str, jax.Array], dict[str, pl.BlockSpec]]:
    """The kernel's operands by name, and the block of each that step (i, j) reads."""
    pad = ((0, tile.count * tile.rows - values.shape[0]), (0, 0))
    still = pl.Buffered(1 if tile.count == 1 else 2)  # a single tile of rows is copied once
    arrays = {"x": jnp.pad(values, pad), **storage(weight)}
    specs = {
        "x": pl.BlockSpec((tile.rows, values.shape[1]), lambda i, j: (i, 0), pipeline_mode=still),
    }
    for name, array in storage(weight).items():
        specs[name] = pl.BlockSpec((tile.columns, array.shape[1]), lambda i, j: (j, 0))
    for name, array in per_group.items():
        arrays[name] = _by_turn(jnp.pad(array, pad), plan)
        turns, _, groups = arrays[name].shape
        shape = (turns, tile.rows, groups)
        specs[name] = pl.BlockSpec(shape, lambda i, j: (0, i, 0), pipeline_mode=still)
    for name, array in _per_output(weight).items():
        if plan.groups_first:
            arrays[name] = array.T
            specs[name] = pl.BlockSpec((plan.groups, tile.columns), lambda i, j: (0, j))
        else:
            arrays[name] = array
            specs[name] = pl.BlockSpec((tile.columns, plan.groups), lambda i, j: (j, 0))
    return arrays, specs


def _per_output(weight: Rounded) -> dict[str, jax.Array]:
    """Scales, and zeros or minima: [N, groups] by name. TPUs have no float16."""
    return {
        name: part.astype(jnp.float32) if part.dtype == jnp.float16 else part
        for name, part in group_parts(weight).items()
    }


def _by_turn(array: jax.Array, plan: _Plan) -> jax.Array:
    """f32[M, groups] -> f32[turns, M, groups of a turn], so that every turn reads fixed lanes."""
    m, groups = array.shape
    if plan.group_size is None:
        return array[None]
    array = jnp.pad(array, ((0, 0), (0, -groups % plan.groups_per_turn)))
    return array.reshape(m, -1, plan.groups_per_turn).transpose(1, 0, 2)


def _kernel(refs: Refs, y: jax.Ref, scratch: Refs, plan: _Plan) -> None:
    """Computes y: f32[M, N], a tile of rows and outputs, from all inputs.

    refs: x: bf16 or int8[M, K]; weights: uint8[N, K / 2] or int8[N, K]; rest: uint8[N, K / 2];
    scales, zeros, minima: [groups, N] or [N, groups]; x_scales, x_sums: f32[turns, M, groups of a
    turn].
    scratch: scales, zeros, minima: f32[groups, N], decoded; total: f32 or i32[M, N].
    """
    decoders = {"scales": decode_scales, "zeros": decode_zeros, "minima": decode_minima}
    for name in decoders.keys() & refs.keys():
        decoded = decoders[name](refs[name][...], plan.kind)
        scratch[name][...] = decoded if plan.groups_first else decoded.T
    if "minima" in refs:  # become the values of the integer zero
        scratch["minima"][...] += scratch["scales"][...] * above_smallest(plan.kind)
    total = scratch["total"]
    total[...] = jnp.zeros_like(total)

    def add_block(turn: jax.Array | int, i: int) -> None:
        for part, product in enumerate(_products(refs, turn * plan.turn + i, y.shape[0], plan)):
            if plan.group_size is not None:
                lane = i * (BLOCK // plan.width) + part
                product = _scaled(product, refs, scratch, turn, lane, plan)
            total[...] += product.astype(total.dtype)

    def add_turn(turn: jax.Array, carry: None) -> None:
        for i in range(plan.turn):
            add_block(turn, i)

    whole = plan.blocks // plan.turn
    lax.fori_loop(0, whole, add_turn, None)
    for i in range(plan.blocks % plan.turn):
        add_block(whole, i)
    y[...] = total[...] if plan.group_size is not None else _finished(refs, scratch, plan)


def _products(refs: Refs, block: jax.Array | int, rows: int, plan: _Plan) -> Iterator[jax.Array]:
    """Yields a block's product for each group, k ascending: f32 or i32[rows, N]."""
    start = block * BLOCK if isinstance(block, int) else pl.multiple_of(block * BLOCK, BLOCK)
    x = refs["x"][:, pl.ds(start, BLOCK)]
    parts = PLANE // plan.width
    for plane, weights in enumerate(planes(refs, block, plan.kind)):
        stacked = lax.dot_general(
            _stacked(x[:, plane * PLANE : (plane + 1) * PLANE], parts),
            weights.astype(x.dtype),
            _CONTRACT_LAST,
            precision=lax.Precision.DEFAULT,
            preferred_element_type=product_dtype(x.dtype),
        )
        for part in range(parts):
            yield stacked[part * x.shape[0] :][:rows]


def _stacked(x: jax.Array, parts: int) -> jax.Array:
    """Stacks `parts` copies of x: [M, PLANE], each zero outside its part of the inputs."""
    if parts == 1:
        return x
    bits = pltpu.bitcast(x, jnp.int32)  # every TPU has 32-bit masks
    part = lax.broadcasted_iota(jnp.int32, bits.shape, 1) >> (PLANE // parts).bit_length() - 1
    copies = [jnp.where(part == i, bits, 0) for i in range(parts)]
    return pltpu.bitcast(jnp.concatenate(copies), x.dtype)


def _scaled(
    product: jax.Array,
    refs: Refs,
    scratch: Refs,
    turn: jax.Array | int,
    lane: int,
    plan: _Plan,
) -> jax.Array:
    """Scales a group's product: f32[M, N]. lane: the group's number within its turn."""
    rows = product.shape[0]
    group = pl.ds(turn * plan.groups_per_turn + lane, 1)
    product = product.astype(jnp.float32)
    if "zeros" in refs:
        product -= refs["x_sums"][turn, :rows, lane : lane + 1] * scratch["zeros"][group, :]
    product *= scratch["scales"][group, :]
    if "minima" in refs:
        product += refs["x_sums"][turn, :rows, lane : lane + 1] * scratch["minima"][group, :]
    if "x_scales" in refs:
        product *= refs["x_scales"][turn, :rows, lane : lane + 1]
    return product


def _finished(refs: Refs, scratch: Refs, plan: _Plan) -> jax.Array:
    """Scales the total of all inputs once: f32[M, N]."""
    total: jax.Array = scratch["total"][...]
    scale: jax.Array = scratch["scales"][...]
    rows = total.shape[0]
    if "zeros" in refs:
        sums = refs["x_sums"][0, :rows, :]
        if plan.exact:  # shifted back, because products of shifted zeros may overflow
            zeros = scratch["zeros"][...].astype(jnp.int32) >> shift(plan.kind)
            total = (total >> shift(plan.kind)) - sums.astype(jnp.int32) * zeros
            scale = scale * (1 << shift(plan.kind))
        else:
            total -= sums * scratch["zeros"][...]
    y = total.astype(jnp.float32) * scale
    if "minima" in refs:
        y += refs["x_sums"][0, :rows, :] * scratch["minima"][...]
    return y * refs["x_scales"][0, :rows, :] if "x_scales" in refs else y
