"""Drafters: one file per family, one protocol (`specjax.drafting.base`)."""

from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.base import Drafter
from specjax.drafting.qspec import QSpec

__all__ = ["Autoregressive", "Drafter", "QSpec"]
