"""Round to nearest: every weight becomes the nearest integer times its group's scale.

    w ≈ q · scale, q in -largest … largest, largest = 2^(bits - 1) - 1

The plain scale maps a group's largest magnitude to the largest integer. A smaller scale clips the
largest weights and represents all others more finely. QuaRot (section 4) searches the ratio with
the smallest error in the weights, AWQ the ratio with the smallest error in the layer's output.

The range is symmetric, so w and -w are treated alike. Two's complement has one more negative
integer, but with these scales it would never be the nearest. Weights of 3 and 2 bits are stored as
4-bit integers of a narrower range. They save no memory and serve experiments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Real

from checkpoints_tools.quantization.rows import over_rows
from pallas_kernels.formats import (
    Int4Weight,
    Int8Weight,
    check_group_size,
    int4_from_integers,
    int8_from_integers,
)
from pallas_kernels.rounding import round_to

BITS = (4, 3, 2)  # the widths that an `Int4Weight` can hold
WEIGHT_RATIOS = tuple(1 - i / 100 for i in range(80))  # QuaRot's grid
WEIGHT_NORM = 2.4  # QuaRot's norm
OUTPUT_RATIOS = tuple(1 - i / 20 for i in range(10))  # AWQ's grid

IntegerWeight = Int4Weight | Int8Weight


def round_to_nearest(
    weight: Float[Array, "N K"],
    group_size: int | None = 128,
    *,
    bits: int = 4,
    ratio: float = 1.0,
) -> IntegerWeight:
    """Rounds a weight: w ≈ q · scale, with scale = ratio · max |w| / largest in bf16 per group.

    q minimizes |w - q · scale|. A group of zeros, or of values so small that their scale is zero,
    becomes zeros.

    Args:
      weight: bf16, f16 or f32[N, K].
      group_size: consecutive inputs that share a scale (32, 64 or 128), or None for one scale per
        output. The last group may be shorter.
      bits: 8 for an `Int8Weight`; 4, 3 or 2 for an `Int4Weight`.
      ratio: the share of the largest magnitude that is represented; larger weights are clipped.

    Returns:
      The quantized matrix; its scales are bf16[N, groups].

    Raises:
      ValueError: `group_size` or `bits` is not supported.
    """
    check_options(group_size, bits)
    rounded: IntegerWeight = over_rows(lambda rows: _round(rows, group_size, bits, ratio), weight)
    return rounded


def round_clipped(
    weight: Float[Array, "N K"],
    group_size: int | None = 128,
    *,
    bits: int = 4,
    second_moment: Float32[Array, "K K"] | None = None,
) -> IntegerWeight:
    """`round_to_nearest` with a searched clip ratio per group, the one with the smallest error.

    Without `second_moment`, the error is Σ |w - q · scale|^2.4 over the group and the ratios are
    1, 0.99 … 0.21 (QuaRot, section 4). With it, the error is E[((w - q · scale) · x)²] over the
    group's inputs x and the ratios are 1, 0.95 … 0.55 (AWQ).

    Args:
      weight: bf16, f16 or f32[N, K].
      group_size: as for `round_to_nearest`.
      bits: as for `round_to_nearest`.
      second_moment: f32[K, K], the mean of x xᵀ, or None.

    Returns:
      The quantized matrix; its scales are bf16[N, groups].

    Raises:
      ValueError: `group_size` or `bits` is not supported.
    """
    check_options(group_size, bits)
    blocks = None if second_moment is None else _diagonal_blocks(second_moment, group_size)
    rounded: IntegerWeight = over_rows(
        lambda rows: _round_searched(rows, blocks, group_size, bits), weight
    )
    return rounded


def largest(bits: int) -> int:
    """The largest integer of the symmetric range."""
    return (1 << bits - 1) - 1


def scales_of(
    groups: Float32[Array, "N G g"], bits: int, ratio: float | Float32[Array, ""] = 1.0
) -> Float32[Array, "N G"]:
    """The scales that map `ratio` times a group's largest magnitude to the largest integer.

    f32[N, G, g] -> f32[N, G], rounded to bf16, so that the weights are divided by the stored scale.
    """
    magnitudes = jnp.max(jnp.abs(groups), axis=-1)
    return round_to(magnitudes * ratio / largest(bits), jnp.bfloat16).astype(jnp.float32)


def searched_scales(
    groups: Float32[Array, "N G g"], bits: int, blocks: Float32[Array, "G g g"] | None = None
) -> Float32[Array, "N G"]:
    """The scales of the clip ratios with the smallest error; see `round_clipped`.

    f32[N, G, g] and, for the error of the output, second moments f32[G, g, g] -> f32[N, G].
    """

    def errors_of(scales: jax.Array) -> jax.Array:
        difference = groups - nearest(groups, scales[..., None], bits) * scales[..., None]
        return _weight_errors(difference) if blocks is None else _output_errors(difference, blocks)

    if blocks is not None:
        return best_scales(groups, bits, OUTPUT_RATIOS, errors_of)
    clipping = clipping_error(groups, largest(bits))
    return best_scales(groups, bits, WEIGHT_RATIOS, errors_of, clipping)


def best_scales(
    groups: Float32[Array, "N G g"],
    bits: int,
    clip_ratios: Sequence[float],
    errors_of: Callable[[Float32[Array, "N G"]], Float32[Array, "N G"]],
    bound_of: Callable[[Float32[Array, "N G"]], Float32[Array, "N G"]] | None = None,
) -> Float32[Array, "N G"]:
    """The scales of the clip ratios with the least errors; of equal ones, those of the first.

    errors_of: from scales f32[N, G] to the errors of their groups, f32[N, G].
    bound_of: from scales to what the errors of these and of all smaller scales are at least, such
      as `clipping_error`. The search ends where no group can gain. None tries every ratio.
    """
    ratios = jnp.asarray(clip_ratios, jnp.float32)

    def scales_at(i: jax.Array) -> jax.Array:
        return scales_of(groups, bits, ratios[i])

    def can_gain(search: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, least, _ = search
        more = i < len(ratios)
        return more if bound_of is None else more & jnp.any(bound_of(scales_at(i)) < least)

    def try_ratio(
        search: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, least, chosen = search
        scales = scales_at(i)
        errors = errors_of(scales)
        better = errors < least
        return i + 1, jnp.where(better, errors, least), jnp.where(better, scales, chosen)

    scales = scales_of(groups, bits)
    start = jnp.asarray(0), jnp.full(scales.shape, jnp.inf), scales
    chosen: jax.Array = jax.lax.while_loop(can_gain, try_ratio, start)[2]
    return chosen


def clipping_error(
    groups: Float32[Array, "N G g"], reach: float, steps: int = 1
) -> Callable[[Float32[Array, "N G"]], Float32[Array, "N G"]]:
    """From scales to the error of every group's largest weight if it is clipped to `reach` scales,
    in `steps` to a scale: what the error of the group is at least."""
    magnitudes = jnp.max(jnp.abs(groups), axis=-1)
    return lambda scales: penalty(steps * jnp.maximum(magnitudes - reach * scales, 0))


def nearest(
    values: Float32[Array, "*shape"], scales: Float32[Array, "*#shape"], bits: int
) -> Float32[Array, "*shape"]:
    """The integers nearest to values / scales, as f32; zeros where the scale is zero."""
    q = jnp.where(scales > 0, jnp.round(values / scales), 0)
    return jnp.clip(q, -largest(bits), largest(bits))


def from_integers(
    q: Real[Array, "N K"], scales: Float32[Array, "N G"], group_size: int | None, bits: int
) -> IntegerWeight:
    """The weight with integers [N, K] and scales f32[N, G], in the format for `bits`."""
    build = int8_from_integers if bits == 8 else int4_from_integers
    return build(q.astype(jnp.int8), scales.astype(jnp.bfloat16), group_size)


@functools.partial(jax.jit, static_argnames=("group_size", "bits"))
def _round(
    weight: jax.Array, group_size: int | None, bits: int, ratio: float | jax.Array
) -> IntegerWeight:
    groups = grouped(weight, group_size)
    return _rounded(weight, groups, scales_of(groups, bits, ratio), group_size, bits)


@functools.partial(jax.jit, static_argnames=("group_size", "bits"))
def _round_searched(
    weight: jax.Array, blocks: jax.Array | None, group_size: int | None, bits: int
) -> IntegerWeight:
    groups = grouped(weight, group_size)
    return _rounded(weight, groups, searched_scales(groups, bits, blocks), group_size, bits)


def _weight_errors(difference: jax.Array) -> jax.Array:
    """Σ |d|^2.4 over every group: f32[N, G, g] -> f32[N, G]."""
    return jnp.sum(penalty(difference), axis=-1)


def penalty(difference: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """|d|^2.4 of every difference, by logarithms: XLA's power takes four times as long on a CPU."""
    return jnp.exp(WEIGHT_NORM * jnp.log(jnp.abs(difference)))


def _output_errors(difference: jax.Array, blocks: jax.Array) -> jax.Array:
    """E[(d · x)²] of every group: f32[N, G, g], f32[G, g, g] -> f32[N, G]."""
    products = jnp.einsum("ngi,gij->ngj", difference, blocks, precision="highest")
    return jnp.sum(products * difference, axis=-1)


def grouped(weight: Float[Array, "N K"], group_size: int | None) -> Float32[Array, "N G g"]:
    """The inputs by groups, the last one padded with zeros: [N, K] -> f32[N, G, g]."""
    n, k = weight.shape
    size = k if group_size is None else group_size
    return jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, -k % size))).reshape(n, -1, size)


def _rounded(
    weight: jax.Array, groups: jax.Array, scales: jax.Array, group_size: int | None, bits: int
) -> IntegerWeight:
    n, k = weight.shape
    q = nearest(groups, scales[..., None], bits).reshape(n, -1)[:, :k]
    return from_integers(q, scales, group_size, bits)


def _diagonal_blocks(second_moment: jax.Array, group_size: int | None) -> jax.Array:
    """The second moments within every group: f32[K, K] -> f32[G, g, g]."""
    k = second_moment.shape[0]
    size = k if group_size is None else group_size
    padded = jnp.pad(second_moment, ((0, -k % size), (0, -k % size)))
    groups = np.arange(padded.shape[0] // size)
    return padded.reshape(len(groups), size, len(groups), size)[groups, :, groups]


def check_options(group_size: int | None, bits: int) -> None:
    check_group_size(group_size)
    if bits not in (8, *BITS):
        raise ValueError(f"bits must be 8, 4, 3 or 2, got {bits!r}")
