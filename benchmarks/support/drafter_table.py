"""The drafters for a 16-bit target that benchmarks compare, by name."""

from __future__ import annotations

from typing import Any

import specjax
from specjax import Adaptive, Drafter, DraftModel, Heuristic, LayerSkip, MultiLevel, Params

_BELOW = 2  # tokens per draft of a small model below a cast


def model_drafters(
    target: Params,
    small: Params,
    skip: LayerSkip,
    *,
    small_length: int = 4,
    cast_length: int = 5,
    levels_length: int = 8,
) -> dict[str, Drafter]:
    """Drafters with models. A cast shares the cache and has a 4-bit head, unless named otherwise.

    Args:
      target: a 16-bit model.
      small: another model of the same vocabulary.
      skip: the drafter that skips layers of the target.
      small_length, cast_length: tokens per draft of the small model, and of a cast.
      levels_length: tokens per draft of a cast that the small model drafts for, two at a time.
    """
    cast = specjax.quantize(target, "mxfp4", lm_head=True)
    body = specjax.quantize(target, "mxfp4")
    integers = specjax.quantize(target, "rtn", lm_head=True)
    small_cast = specjax.quantize(small, "mxfp4", lm_head=True)

    def shared(params: Params, length: int = cast_length, **options: Any) -> DraftModel:
        return DraftModel(params, length, share_cache=True, **options)

    def below() -> DraftModel:
        return DraftModel(small_cast, _BELOW)

    return {
        "small model": DraftModel(small, small_length),
        "small model, MXFP4": DraftModel(small_cast, small_length),
        "MXFP4 cast": shared(cast),
        "MXFP4 cast, a8": shared(cast, activation="a8"),
        "MXFP4 cast, own cache": DraftModel(cast, cast_length),
        "MXFP4 cast, 16-bit head": shared(body),
        "MXFP4 cast, own cache, 16-bit head": DraftModel(body, cast_length),
        "INT4 cast, a8": shared(integers, activation="a8"),
        "layer skip": skip,
        "two levels": MultiLevel(shared(cast, levels_length), below()),
        "two levels, MXFP4 a8": MultiLevel(shared(cast, levels_length, activation="a8"), below()),
        "two levels, INT4 a8": MultiLevel(
            shared(integers, levels_length, activation="a8"), below()
        ),
        "three levels": MultiLevel.of(
            [DraftModel(integers, levels_length), DraftModel(cast, 4), below()]
        ),
        "MXFP4 cast, confident": shared(cast, levels_length, confidence=0.4),
        "MXFP4 cast, heuristic": shared(cast, 12, schedule=Heuristic()),
        "MXFP4 cast, adaptive": shared(cast, 12, schedule=Adaptive()),
    }
