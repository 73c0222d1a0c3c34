"""Parses the name of a method, which is a list of parts joined by "+".

    [quarot+][awq+][atom+ or act-order+]rounding     "quarot", "awq" and "atom" may stand alone;
                                                     "nested8" rounds to 8 bits, 4 of which draft

    bfloat12                                         exact, in 12 bits
    nested16[+rounding]                              exact in 12 bits, and rounded in 4 that draft

The parts before the rounding change the weights that are rounded, but not the model's function:
they rotate the whole model, move scales between its layers, or reorder a weight's columns. With
QuaRot and Atom, "a4" clips activations to 0.9 of their group's largest magnitude, the ratio of both
papers' authors.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from checkpoints_tools.quantization.atom import WEIGHT_CLIP, mix_precisions
from checkpoints_tools.quantization.calibration import InputStatistics
from checkpoints_tools.quantization.exact import in_12_bits, nested
from checkpoints_tools.quantization.gptq import round_by_gptq
from checkpoints_tools.quantization.mxfp4 import cast_to_mxfp4
from checkpoints_tools.quantization.nested8 import round_nested
from checkpoints_tools.quantization.rtn import BITS, IntegerWeight, round_clipped, round_to_nearest
from pallas_kernels.formats import MXFP4_GROUP, Int4Weight, Quantized, check_group_size
from pallas_kernels.weights import Rounded, Weight
from specjax.checks import shown

TRANSFORMS = ("quarot", "awq", "atom", "act-order")  # in the order in which they apply
INTEGER_ROUNDINGS = ("rtn", "rtn-clip", "gptq", "gptq-clip")  # to `bits` bits
GPTQ = ("gptq", "gptq-clip")
ROUNDINGS = (*INTEGER_ROUNDINGS, "int8", "nested8", "mxfp4", "mxfp4-even")
EXACT = ("bfloat12", "nested16")  # the first part of methods that keep a bfloat16 model exactly
DRAFTS = (*INTEGER_ROUNDINGS, "mxfp4", "mxfp4-even")  # roundings of nested16's draft plane
DRAFT = "rtn-clip"  # the one that it has if none is named
DEFAULT_GROUP = 128
ACTIVATION_CLIP = 0.9


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A method with its options, checked on construction.

    method: the name.
    group_size: inputs per scale: 32, 64, 128 or None (one scale per output). MXFP4 always has 32,
      and bfloat12 none.
    bits: the width of the integers: 4, or 3 or 2 within 4-bit storage.
    """

    method: str
    group_size: int | None = DEFAULT_GROUP
    bits: int = 4

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        if self.bits not in BITS:
            raise ValueError(f"bits must be 4, 3 or 2, got {self.bits!r}")
        parts = self.method.split("+") if isinstance(self.method, str) else [""]
        *before, last = parts
        if last.startswith("mxfp4") and self.group_size not in (MXFP4_GROUP, DEFAULT_GROUP):
            raise ValueError(f"{last} has groups of 32; leave group_size out or set it to 32")
        if parts[0] in EXACT:
            self._check_exact(parts)
            return
        transforms = before if last in ROUNDINGS else parts
        if transforms != [part for part in TRANSFORMS if part in transforms]:
            raise ValueError(
                f"method must be one of {', '.join(ROUNDINGS)}, with any of "
                f"{', '.join(part + '+' for part in TRANSFORMS)} before it in this order, "
                f"or {' or '.join(EXACT)}, got {shown(self.method)}"
            )
        if "act-order" in parts and (last not in GPTQ or "atom" in parts):
            raise ValueError(f"act-order goes with gptq only: act-order+gptq, got {self.method!r}")
        if "atom" in parts and last not in ("atom", *INTEGER_ROUNDINGS):
            raise ValueError(
                f"atom goes before {', '.join(INTEGER_ROUNDINGS)} or stands last, "
                f"got {self.method!r}"
            )
        if last not in INTEGER_ROUNDINGS and last in ROUNDINGS and self.bits != 4:
            raise ValueError(f"{last} fixes its bits; leave bits out, got {self.bits}")

    def _check_exact(self, parts: list[str]) -> None:
        exact, *rounding = parts
        if exact == "nested16" and len(rounding) <= 1 and set(rounding) <= set(DRAFTS):
            if self.bits != 4:
                raise ValueError(f"nested16 drafts in 4 bits; leave bits out, got {self.bits}")
        elif exact == "nested16":
            raise ValueError(
                f"nested16 stands alone or before {', '.join(DRAFTS)}, got {shown(self.method)}"
            )
        elif rounding:
            raise ValueError(f"bfloat12 stands alone, got {shown(self.method)}")
        elif (self.group_size, self.bits) != (DEFAULT_GROUP, 4):
            raise ValueError(
                "bfloat12 has neither scales nor integers; leave group_size and bits out, "
                f"got {self.group_size} and {self.bits}"
            )

    @property
    def exact(self) -> str | None:
        """The first part if it is one of EXACT, else None."""
        first = self.method.split("+")[0]
        return first if first in EXACT else None

    @property
    def rounding(self) -> str | None:
        """The last part if it is a rounding, else None; of nested16, what makes its draft plane."""
        last = self.method.split("+")[-1]
        if last == "nested16":
            return DRAFT
        return last if last in ROUNDINGS else None

    @property
    def weights(self) -> str:
        """The format of what it makes, a name in `specjax.model.sizes.FORMATS`."""
        if self.exact is not None:
            return self.exact
        own = {"int8": "int8", "nested8": "nested8", "mxfp4": "mxfp4", "mxfp4-even": "mxfp4"}
        return own.get(self.rounding or "", "int4")

    @property
    def transforms(self) -> bool:
        """Whether a transform changes weights before they are rounded."""
        return any(self.has(part) for part in ("quarot", "awq", "atom"))

    def has(self, part: str) -> bool:
        """Whether the method has this part."""
        return part in self.method.split("+")

    @property
    def needs_calibration(self) -> bool:
        """Whether the method needs statistics of activations."""
        return any(self.has(part) for part in ("awq", "atom", *GPTQ))

    def round_plainly(self, weight: jax.Array) -> Rounded:
        """Rounds a weight, f32[N, K], without data, as AWQ's search does."""
        if self.rounding == "int8":
            return round_to_nearest(weight, self.group_size, bits=8)
        if self.rounding == "nested8":
            return round_nested(weight, self.group_size)
        if self.rounding in ("mxfp4", "mxfp4-even"):
            return cast_to_mxfp4(weight, "even" if self.rounding == "mxfp4-even" else "floor")
        if self.rounding == "rtn-clip":
            return round_clipped(weight, self.group_size, bits=self.bits)
        return round_to_nearest(weight, self.group_size, bits=self.bits)

    def round(
        self, name: str, weight: jax.Array, statistics: InputStatistics | None = None
    ) -> Weight:
        """Rounds one weight.

        Args:
          name: the linear layer's, such as "q" or "lm_head".
          weight: bf16, f16 or f32[N, K], after the transforms.
          statistics: its inputs'; None if the method does not need calibration.

        Returns:
          The quantized weight.
        """
        if self.exact == "bfloat12":
            return in_12_bits(name, weight)
        if self.exact == "nested16":
            return nested(name, weight, self._round(name, weight, statistics))
        rounded = self._round(name, weight, statistics)
        if isinstance(rounded, Int4Weight) and (self.has("quarot") or self.has("atom")):
            return dataclasses.replace(rounded, activation_clip=ACTIVATION_CLIP)
        return rounded

    def _round(self, name: str, weight: jax.Array, statistics: InputStatistics | None) -> Rounded:
        if self.has("atom"):
            assert statistics is not None
            return mix_precisions(weight, statistics, self._round_sorted)
        if self.rounding in GPTQ:
            assert statistics is not None
            return self._gptq(weight, statistics)
        # AWQ clips too, except queries and keys: their product magnifies clipping errors.
        if self.rounding is None and self.has("awq") and name not in ("q", "k"):
            assert statistics is not None
            moment = statistics.second_moment
            return round_clipped(weight, self.group_size, bits=self.bits, second_moment=moment)
        return self.round_plainly(weight)

    def _round_sorted(self, weight: jax.Array, statistics: InputStatistics) -> Quantized:
        """Rounds Atom's 4-bit columns."""
        if self.rounding in GPTQ:
            return self._gptq(weight, statistics)
        if self.rounding == "rtn-clip":
            return round_clipped(weight, self.group_size, bits=self.bits)
        return round_to_nearest(weight, self.group_size, bits=self.bits, ratio=WEIGHT_CLIP)

    def _gptq(self, weight: jax.Array, statistics: InputStatistics) -> Quantized:
        if not self.has("act-order"):
            return self._gptq_in_order(weight, statistics)
        order = jnp.argsort(-jnp.diagonal(statistics.second_moment)).astype(jnp.int32)
        stored = self._gptq_in_order(weight[:, order], statistics.take(order))
        return dataclasses.replace(stored, order=order)

    def _gptq_in_order(self, weight: jax.Array, statistics: InputStatistics) -> IntegerWeight:
        ratio = None if self.rounding == "gptq-clip" else WEIGHT_CLIP if self.has("atom") else 1.0
        moment = statistics.second_moment
        return round_by_gptq(weight, moment, self.group_size, bits=self.bits, ratio=ratio)
