"""Every quantized weight times activations of 16, 8 or 4 bits, as one Pallas kernel for TPUs.

The meaning is that of `pallas_kernels.reference`, with two differences of rounding: "a16" rounds a
float32 x to bfloat16 for the matrix unit, and the scale multiplies a group's sum, not every weight.
A weight's integers are exact in int8 and in bfloat16, so a precision is no more than a type of x:

    a16      bfloat16 products, summed in float32, scaled by the weight's scales
    a8, a4   int8 products, summed in int32, scaled by both scales; where the chip multiplies no
             int8 (v4, 7x) bfloat16 products, whose sums within 128 inputs are integers of at most
             128 · 128 · 128 < 2^24: the same numbers, exactly

A group of 32 or 64 fills a quarter or half of what the matrix unit loads at once. The weight is not
loaded in as many parts: a plane of 128 inputs is loaded once, and x is stacked, one copy for each
of the plane's groups, zero elsewhere.

Order of summation: within a group, what one product of 128 inputs does in the matrix unit, which
knows of no other row; then group after group, k ascending, in float32, or in integers where one
scale serves all inputs. Both depend on the weight's shape alone. The number of rows in a tile
(`tiles.choose`) decides how many rows ride along and nothing else, so a row's bits do not depend on
M. That is by construction for "a8" and "a4"; for "a16" it rests on the matrix unit and on Mosaic's
`shape_invariant_numerics`, which is set by default, and no TPU was at hand to see it.

Left out: tiles chosen by measurement, a prepacked layout, quantizing x inside the kernel, outliers
(`pallas_kernels.matmul` adds them), and a conversion from int8 that suits v4, where the compiler
schedules several times the cycles of the chips after it.
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

from pallas_kernels.activations import Activation
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
from pallas_kernels.operands import check, group_parts, group_sums, multiplicands, product_dtype

Refs = dict[str, jax.Ref]  # a kernel's operands, or its scratch memory, by name

BLOCKS_PER_TURN = 4  # the more, the more the scheduler has to fill gaps with
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything about a call that is known before the kernel runs."""

    kind: type[Quantized]
    group_size: int | None
    blocks: int  # of 256 inputs
    exact: bool  # the products are integers

    @property
    def turn(self) -> int:
        """Blocks in one turn of the loop."""
        return min(BLOCKS_PER_TURN, self.blocks)

    @property
    def width(self) -> int:
        """Inputs whose products are summed before they are scaled or, ungrouped, added up."""
        return self.group_size or PLANE

    @property
    def groups(self) -> int:
        return self.blocks * BLOCK // self.group_size if self.group_size else 1

    @property
    def groups_first(self) -> bool:
        """Whether [N, groups] lies in memory as [groups, N]: XLA's choice, which pads the least."""
        return self.groups < tiles.LANES

    @property
    def groups_per_turn(self) -> int:
        return self.turn * (BLOCK // self.width)

    @property
    def total_dtype(self) -> np.dtype:
        """Without groups the sum of integers stays one: a single scale multiplies all of it."""
        return np.dtype(np.int32 if self.exact and self.group_size is None else np.float32)


def matmul(
    x: jax.Array,
    weight: Quantized,
    activation: Activation = "a16",
    *,
    int8_products: bool | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x: bf16 or f32[M, K] times weight: [N, K] -> f32[M, N].

    Args:
      activation: "a16", "a8" or "a4", as in `pallas_kernels.matmul.matmul`.
      int8_products: whether "a8" and "a4" multiply int8, or bfloat16; None: what the chip does.
      interpret: runs the kernel as ordinary XLA operations, on any platform.

    Raises:
      ValueError: a shape or dtype that the kernel does not serve.
    """
    check(x, weight, activation)
    x = jnp.pad(x, ((0, 0), (0, padded_inputs(x.shape[1]) - x.shape[1])))
    values, x_scales = multiplicands(x, weight.group_size, activation)
    per_group = {} if activation == "a16" else {"x_scales": x_scales}
    if group_parts(weight).keys() & {"zeros", "minima"}:
        per_group["x_sums"] = group_sums(values, weight.group_size)
    if int8_products is None:
        int8_products = multiplies_int8()
    if not int8_products:
        values = values.astype(jnp.bfloat16)
    return multiply(values, per_group, weight, interpret=interpret)


def multiplies_int8() -> bool:
    """Whether the TPU that is compiled for multiplies int8; yes where there is none."""
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().int8_ops_per_second > 0


def multiply(
    values: jax.Array,
    per_group: dict[str, jax.Array],
    weight: Quantized,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The kernel over a grid of M and N: a step has all inputs of its outputs.

    values: bf16 or int8[M, padded K]; per_group: f32[M, groups], "x_scales" where the values are
    integers, "x_sums" where the weight has zeros or minima -> f32[M, N].
    """
    m, n = values.shape[0], weight.shape[0]
    plan = _Plan(type(weight), weight.group_size, values.shape[1] // BLOCK, "x_scales" in per_group)
    tile = _tiles(values, len(per_group), weight, plan)
    rows = tile.rows if tile.count > 1 else -(-m // 8) * 8  # the registers that hold results
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


def _tiles(values: jax.Array, per_group: int, weight: Quantized, plan: _Plan) -> tiles.Tiles:
    """The tiles for x: bf16 or int8[M, K] and `per_group` arrays of one value per row and group."""
    m, k = values.shape
    turns = 1 if plan.group_size is None else pl.cdiv(plan.blocks, plan.turn)
    return tiles.choose(
        m,
        weight.shape[0],
        weight_bytes=storage(weight).shape[1],
        row_bytes=k * values.dtype.itemsize + per_group * turns * tiles.LANES * 4,
        packing=32 // values.dtype.itemsize,
        groups_per_plane=PLANE // plan.width if plan.group_size else 1,
    )


def _operands(
    values: jax.Array,
    per_group: dict[str, jax.Array],
    weight: Quantized,
    plan: _Plan,
    tile: tiles.Tiles,
) -> tuple[dict[str, jax.Array], dict[str, pl.BlockSpec]]:
    """The kernel's operands by name, and the part of each that step (i, j) reads."""
    pad = ((0, tile.count * tile.rows - values.shape[0]), (0, 0))
    still = pl.Buffered(1 if tile.count == 1 else 2)  # one tile of rows is copied once
    arrays = {"x": jnp.pad(values, pad), "weights": storage(weight)}
    specs = {
        "x": pl.BlockSpec((tile.rows, values.shape[1]), lambda i, j: (i, 0), pipeline_mode=still),
        "weights": pl.BlockSpec((tile.columns, arrays["weights"].shape[1]), lambda i, j: (j, 0)),
    }
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


def _per_output(weight: Quantized) -> dict[str, jax.Array]:
    """Scales, and zeros or minima: [N, groups]. TPUs lack float16."""
    return {
        name: part.astype(jnp.float32) if part.dtype == jnp.float16 else part
        for name, part in group_parts(weight).items()
    }


def _by_turn(array: jax.Array, plan: _Plan) -> jax.Array:
    """f32[M, groups] -> f32[turns, M, groups of a turn]: a turn of the loop reads fixed lanes."""
    m, groups = array.shape
    if plan.group_size is None:
        return array[None]
    array = jnp.pad(array, ((0, 0), (0, -groups % plan.groups_per_turn)))
    return array.reshape(m, -1, plan.groups_per_turn).transpose(1, 0, 2)


def _kernel(refs: Refs, y: jax.Ref, scratch: Refs, plan: _Plan) -> None:
    """One step: y: f32[M, N] from all inputs of a tile of rows and outputs.

    refs: x: bf16 or int8[M, K]; weights: uint8[N, K / 2] or int8[N, K]; scales, zeros, minima:
    [groups, N] or [N, groups]; x_scales, x_sums: f32[turns, M, groups of a turn].
    scratch: scales, zeros, minima: f32[groups, N], decoded; total: f32 or i32[M, N].
    """
    decoders = {"scales": decode_scales, "zeros": decode_zeros, "minima": decode_minima}
    for name in decoders.keys() & refs.keys():
        decoded = decoders[name](refs[name][...], plan.kind)
        scratch[name][...] = decoded if plan.groups_first else decoded.T
    if "minima" in refs:  # from here on, the values of the integer zero
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
    """The products of a block with each group in turn, k ascending: f32 or i32[rows, N]."""
    start = block * BLOCK if isinstance(block, int) else pl.multiple_of(block * BLOCK, BLOCK)
    x = refs["x"][:, pl.ds(start, BLOCK)]
    parts = PLANE // plan.width
    for plane, weights in enumerate(planes(refs["weights"], block, plan.kind)):
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
    """`parts` copies of x: [M, PLANE], each zero outside its part of the inputs."""
    if parts == 1:
        return x
    bits = pltpu.bitcast(x, jnp.int32)  # there are masks for 32 bits on every TPU
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
    """A group's product, scaled: f32[M, N]. lane: the group's number within its turn."""
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
    """The total of all inputs, scaled once: f32[M, N]."""
    total: jax.Array = scratch["total"][...]
    scale: jax.Array = scratch["scales"][...]
    rows = total.shape[0]
    if "zeros" in refs:
        sums = refs["x_sums"][0, :rows, :]
        if plan.exact:  # the integers themselves: 16 times their products with zeros may overflow
            zeros = scratch["zeros"][...].astype(jnp.int32) >> shift(plan.kind)
            total = (total >> shift(plan.kind)) - sums.astype(jnp.int32) * zeros
            scale = scale * (1 << shift(plan.kind))
        else:
            total -= sums * scratch["zeros"][...]
    y = total.astype(jnp.float32) * scale
    if "minima" in refs:
        y += refs["x_sums"][0, :rows, :] * scratch["minima"][...]
    return y * refs["x_scales"][0, :rows, :] if "x_scales" in refs else y
