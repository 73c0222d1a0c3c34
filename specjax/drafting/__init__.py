"""Drafters: one file per family, one protocol (`specjax.drafting.base`)."""

from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.base import Drafter
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.layer_skip import LayerSkip
from specjax.drafting.multilevel import MultiLevel
from specjax.drafting.qspec import QSpec
from specjax.drafting.schedules import Adaptive, Heuristic

__all__ = [
    "Adaptive",
    "Autoregressive",
    "DraftModel",
    "Drafter",
    "Heuristic",
    "LayerSkip",
    "MultiLevel",
    "QSpec",
]
