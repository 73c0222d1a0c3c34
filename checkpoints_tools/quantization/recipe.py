"""What a method's name stands for: its parts, joined by "+".

    [quarot+][awq+][atom+ or act-order+]rounding     "quarot", "awq" and "atom" may stand alone

The parts before the rounding change what is rounded and leave the model's function as it is:
rotations of the whole model, scales between its layers, the order of a weight's columns. With
QuaRot and Atom, "a4" clips activations to 0.9 of their group's largest magnitude, as the authors of
both do.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from checkpoints_tools.quantization.atom import WEIGHT_CLIP, mix_precisions
from checkpoints_tools.quantization.calibration import InputStatistics
from checkpoints_tools.quantization.gptq import round_by_gptq
from checkpoints_tools.quantization.mxfp4 import cast_to_mxfp4
from checkpoints_tools.quantization.rtn import BITS, IntegerWeight, round_clipped, round_to_nearest
from pallas_kernels.formats import MXFP4_GROUP, Int4Weight, Quantized, check_group_size

TRANSFORMS = ("quarot", "awq", "atom", "act-order")  # in the order in which they apply
INTEGER_ROUNDINGS = ("rtn", "rtn-clip", "gptq", "gptq-clip")  # to `bits` bits
GPTQ = ("gptq", "gptq-clip")
ROUNDINGS = (*INTEGER_ROUNDINGS, "int8", "mxfp4", "mxfp4-even")
DEFAULT_GROUP = 128
ACTIVATION_CLIP = 0.9


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A method with its options, checked when it is made.

    method: the name.
    group_size: inputs per scale: 32, 64, 128 or None (one scale per output); of MXFP4 always 32.
    bits: of the integers: 4, or 3 or 2 within 4-bit storage.
    """

    method: str
    group_size: int | None = DEFAULT_GROUP
    bits: int = 4

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        if self.bits not in BITS:
            raise ValueError(f"bits must be 4, 3 or 2, got {self.bits!r}")
        parts = self.method.split("+")
        *before, last = parts
        transforms = before if last in ROUNDINGS else parts
        if transforms != [part for part in TRANSFORMS if part in transforms]:
            raise ValueError(
                f"method must be one of {', '.join(ROUNDINGS)}, with any of "
                f"{', '.join(part + '+' for part in TRANSFORMS)} before it in this order, "
                f"got {self.method!r}"
            )
        if "act-order" in parts and (last not in GPTQ or "atom" in parts):
            raise ValueError(f"act-order is an order of gptq: act-order+gptq, got {self.method!r}")
        if "atom" in parts and last not in ("atom", *INTEGER_ROUNDINGS):
            raise ValueError(
                f"atom goes before {', '.join(INTEGER_ROUNDINGS)} or stands last, "
                f"got {self.method!r}"
            )
        if last.startswith("mxfp4") and self.group_size not in (MXFP4_GROUP, DEFAULT_GROUP):
            raise ValueError(f"{last} has groups of 32; leave group_size out or give 32")
        if last not in INTEGER_ROUNDINGS and last in ROUNDINGS and self.bits != 4:
            raise ValueError(f"{last} fixes its bits; leave bits out, got {self.bits}")

    @property
    def rounding(self) -> str | None:
        """The last part, or None where the method leaves it to its transforms."""
        last = self.method.split("+")[-1]
        return last if last in ROUNDINGS else None

    @property
    def transforms(self) -> bool:
        """Whether weights change before they are rounded."""
        return any(self.has(part) for part in ("quarot", "awq", "atom"))

    def has(self, part: str) -> bool:
        """Whether `part` is one of the method's."""
        return part in self.method.split("+")

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at activations."""
        return any(self.has(part) for part in ("awq", "atom", *GPTQ))

    def round_plainly(self, weight: jax.Array) -> Quantized:
        """What the rounding would do without data: for AWQ's search. f32[N, K]."""
        if self.rounding == "int8":
            return round_to_nearest(weight, self.group_size, bits=8)
        if self.rounding in ("mxfp4", "mxfp4-even"):
            return cast_to_mxfp4(weight, "even" if self.rounding == "mxfp4-even" else "floor")
        if self.rounding == "rtn-clip":
            return round_clipped(weight, self.group_size, bits=self.bits)
        return round_to_nearest(weight, self.group_size, bits=self.bits)

    def round(
        self, name: str, weight: jax.Array, statistics: InputStatistics | None = None
    ) -> Quantized:
        """Rounds one weight.

        Args:
          name: of the linear layer, such as "q" or "lm_head".
          weight: bf16, f16 or f32[N, K], as the transforms left it.
          statistics: of its inputs; None where the method needs no calibration.

        Returns:
          The quantized weight.
        """
        rounded = self._round(name, weight, statistics)
        if isinstance(rounded, Int4Weight) and (self.has("quarot") or self.has("atom")):
            return dataclasses.replace(rounded, activation_clip=ACTIVATION_CLIP)
        return rounded

    def _round(self, name: str, weight: jax.Array, statistics: InputStatistics | None) -> Quantized:
        if self.has("atom"):
            assert statistics is not None
            return mix_precisions(weight, statistics, self._round_sorted)
        if self.rounding in GPTQ:
            assert statistics is not None
            return self._gptq(weight, statistics)
        # AWQ clips too, but not queries and keys: their product magnifies what is cut.
        if self.rounding is None and self.has("awq") and name not in ("q", "k"):
            assert statistics is not None
            moment = statistics.second_moment
            return round_clipped(weight, self.group_size, bits=self.bits, second_moment=moment)
        return self.round_plainly(weight)

    def _round_sorted(self, weight: jax.Array, statistics: InputStatistics) -> Quantized:
        """The 4-bit columns of Atom's."""
        if self.rounding in GPTQ:
            return self._gptq(weight, statistics)
        if self.rounding == "rtn-clip":
            return self.round_plainly(weight)
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
