"""Drafters: one file per family, all of them a `specjax.speculation.drafter.Drafter`."""

from specjax.drafting.auto import Auto
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.combined import Combined
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.draft_tree import DraftTree
from specjax.drafting.layer_skip import LayerSkip
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.multilevel import MultiLevel
from specjax.drafting.ngram import NGram
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.drafting.qspec import QSpec
from specjax.drafting.registry import Option, make, options
from specjax.drafting.retrieval import Retrieval
from specjax.drafting.schedules import Adaptive, Heuristic
from specjax.drafting.spectra import Spectra
from specjax.drafting.token_recycling import TokenRecycling
from specjax.drafting.translated import TranslatedDraft
from specjax.speculation.drafter import Drafter

__all__ = [
    "Adaptive",
    "Auto",
    "Autoregressive",
    "Combined",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Heuristic",
    "LayerSkip",
    "Lookahead",
    "MultiLevel",
    "NGram",
    "Option",
    "PromptLookup",
    "QSpec",
    "Retrieval",
    "Spectra",
    "TokenRecycling",
    "TranslatedDraft",
    "make",
    "options",
]
