"""GPTQ (Frantar et al. 2023) minimizes the output error of a rounded weight.

Columns are rounded one after another, and the columns that are still to come compensate for each
column's error. Let H = E[x xᵀ], and let U be the upper triangular factor of its inverse,
H⁻¹ = Uᵀ U, scaled to a unit diagonal row by row (the paper's algorithm 1):

    error = W[:, j] - round(W[:, j]),     W[:, j:] -= error · U[j, j:]

Columns are processed one by one within a group, and then the group's errors go to all later columns
in one matrix product. A group's scale is computed when its turn comes, from weights that already
compensate for earlier errors.

Weights of an input that was always zero during calibration are rounded to nearest. (The authors set
them to zero, which loses an input that occurs later.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Float, Float32

from checkpoints_tools.quantization.rows import over_rows
from checkpoints_tools.quantization.rtn import (
    IntegerWeight,
    check_options,
    from_integers,
    nearest,
    scales_of,
    searched_scales,
)

DAMPING = 0.01  # times the mean of H's diagonal is added to the diagonal
_BLOCK = 128  # columns at a time if a row has one scale


def round_by_gptq(
    weight: Float[Array, "N K"],
    second_moment: Float32[Array, "K K"],
    group_size: int | None = 128,
    *,
    bits: int = 4,
    ratio: float | None = 1.0,
    damping: float = DAMPING,
) -> IntegerWeight:
    """Rounds a weight W to Q so that E[|(W - Q) x|²] is small.

    Args:
      weight: bf16, f16 or f32[N, K].
      second_moment: f32[K, K], the mean of x xᵀ, times any positive factor.
      group_size: inputs that share a scale: 32, 64, 128, or None for one scale per output.
      bits: 8, 4, 3 or 2.
      ratio: the share of a group's largest magnitude that is represented; None searches the ratio
        with the smallest error in the weights of each group (`rtn.round_clipped`), as in QuaRot.
      damping: the share of the diagonal's mean that is added to the diagonal.

    Returns:
      The quantized matrix; its scales are bf16[N, groups].

    Raises:
      ValueError: `group_size` or `bits` is not supported, or `second_moment` is not positive
        semidefinite.
    """
    check_options(group_size, bits)
    factor = jnp.asarray(inverse_factor(second_moment, damping))
    rounded: IntegerWeight = over_rows(
        lambda rows: _round_rows(rows, factor, group_size, bits, ratio), weight
    )
    return rounded


def inverse_factor(
    second_moment: Float32[Array | np.ndarray, "K K"], damping: float = DAMPING
) -> Float32[np.ndarray, "K K"]:
    """U of the module's equation for the damped second moment, with a unit diagonal: f32[K, K].

    It is computed in float64 on the host. The factor of a nearly singular matrix needs float64,
    which an accelerator may lack.
    """
    # H = R Rᵀ with R upper triangular gives H⁻¹ = (R⁻¹)ᵀ R⁻¹, so U = R⁻¹. Cholesky's factor is
    # lower triangular, so the matrix is reversed, and its factor is R reversed. One buffer serves.
    turned = np.array(np.asarray(second_moment)[::-1, ::-1], np.float64, order="F")
    diagonal = np.diagonal(turned).copy()
    seen = diagonal > 0
    mean = diagonal.sum() / max(seen.sum(), 1)
    turned[np.diag_indices_from(turned)] += np.where(seen, damping * mean, 1)
    try:
        factor = scipy.linalg.cholesky(turned, lower=True, overwrite_a=True, check_finite=False)
    except np.linalg.LinAlgError as error:
        raise ValueError(f"second_moment must be positive semidefinite: {error}") from error
    inverse: np.ndarray = scipy.linalg.lapack.dtrtri(factor, lower=1, overwrite_c=1)[0]
    inverse /= np.diagonal(inverse).copy()[:, None]
    return inverse.astype(np.float32)[::-1, ::-1]


@functools.partial(jax.jit, static_argnames=("group_size", "bits", "ratio"))
def _round_rows(
    weight: jax.Array, factor: jax.Array, group_size: int | None, bits: int, ratio: float | None
) -> IntegerWeight:
    """weight: [N, K], factor: f32[K, K], see `inverse_factor`."""
    n, k = weight.shape
    size = _BLOCK if group_size is None else group_size
    padding = -k % size
    weight = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, padding)))
    factor = jnp.pad(factor, ((0, padding), (0, padding)))
    find_scales = searched_scales if ratio is None else functools.partial(scales_of, ratio=ratio)
    whole = find_scales(weight[:, None], bits)  # f32[N, 1], for one scale per row

    def round_group(group: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weight, q, scales = carry
        start = group * size
        columns = lax.dynamic_slice_in_dim(weight, start, size, axis=1)
        scale = whole if group_size is None else find_scales(columns[:, None], bits)
        rows = lax.dynamic_slice_in_dim(factor, start, size, axis=0)
        within = lax.dynamic_slice_in_dim(rows, start, size, axis=1)
        rounded, errors = _round_columns(columns.T, within, scale[:, 0], bits)
        # This changes earlier columns too, but they are not used again.
        return (
            weight - jnp.matmul(errors.T, rows, precision="highest"),
            lax.dynamic_update_slice_in_dim(q, rounded.T.astype(jnp.int8), start, axis=1),
            lax.dynamic_update_slice_in_dim(scales, scale, group, axis=1),
        )

    groups = weight.shape[1] // size
    start = weight, jnp.zeros(weight.shape, jnp.int8), jnp.zeros((n, groups))
    _, q, scales = lax.fori_loop(0, groups, round_group, start)
    return from_integers(q[:, :k], whole if group_size is None else scales, group_size, bits)


def _round_columns(
    columns: jax.Array, factor: jax.Array, scale: jax.Array, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Rounds one group's columns one after another: the integers and the errors, f32[g, N] each.

    columns: f32[g, N]; factor: f32[g, g]; scale: f32[N].
    """

    def round_column(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns, q, errors = carry
        rounded = nearest(columns[j], scale, bits)
        error = columns[j] - rounded * scale
        return columns - factor[j][:, None] * error, q.at[j].set(rounded), errors.at[j].set(error)

    zeros = jnp.zeros_like(columns)
    _, q, errors = lax.fori_loop(0, len(columns), round_column, (columns, zeros, zeros))
    return q, errors
