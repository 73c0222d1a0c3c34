"""bfloat16 matrices kept exactly in 12 bits, alone or with a 4-bit plane that drafts."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.bfloat12 import Bfloat12Weight, bfloat12
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Mxfp4Weight
from pallas_kernels.nested import NestedWeight
from pallas_kernels.weights import Weight


def in_12_bits(name: str, weight: Float[Array, "N K"]) -> Bfloat12Weight | Bfloat16Weight:
    """Encodes a matrix. One with too many escapes stays in 16 bits, and a warning says how many.

    Args:
      name: the matrix's, for the warning.
      weight: bf16, f16 or f32[N, K]; the model that is kept exactly has it in bfloat16.
    """
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.bfloat16), jnp.uint16)
    made, escapes = bfloat12(bits)
    if made is not None:
        return made
    warnings.warn(
        f"{name} stays in 16 bits: {escapes} of its {bits.size} values do not fit into 12",
        stacklevel=2,
    )
    return Bfloat16Weight(bits)


def nested(name: str, weight: Float[Array, "N K"], draft: Weight) -> NestedWeight:
    """Joins the exact plane of a matrix with a draft plane of it."""
    assert isinstance(draft, Int4Weight | Mxfp4Weight)
    return NestedWeight(in_12_bits(name, weight), draft)
