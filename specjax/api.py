"""The public names of specjax that need no other package; `specjax` finds them when one is used."""

from specjax.drafting import (
    Adaptive,
    Auto,
    Autoregressive,
    Combined,
    Drafter,
    DraftModel,
    DraftTree,
    Heuristic,
    LayerSkip,
    Lookahead,
    MultiLevel,
    NGram,
    PromptLookup,
    QSpec,
    Retrieval,
    Spectra,
    TokenRecycling,
    TranslatedDraft,
)
from specjax.drafting.datastore import Datastore
from specjax.drafting.suffix_memory import SuffixMemory
from specjax.generation.batching import Progress, decode_many
from specjax.generation.completion import Completion
from specjax.generation.constraints import Constraint
from specjax.generation.decoding import DecodeResult, decode
from specjax.generation.generating import Generation, generate
from specjax.generation.streaming import Round, stream, stream_many
from specjax.model import parallel
from specjax.model.config import ModelConfig, RopeScaling
from specjax.model.params import Params, prepack
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import DecodeState, Proposal, Stats, Verified

__all__ = [
    "Adaptive",
    "Auto",
    "Autoregressive",
    "Combined",
    "Completion",
    "Constraint",
    "Datastore",
    "DecodeResult",
    "DecodeState",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Generation",
    "Heuristic",
    "LayerSkip",
    "LogitBias",
    "Logprobs",
    "Lookahead",
    "ModelConfig",
    "MultiLevel",
    "NGram",
    "Params",
    "Progress",
    "PromptLookup",
    "Proposal",
    "QSpec",
    "Retrieval",
    "RopeScaling",
    "Round",
    "Sampling",
    "Spectra",
    "Stats",
    "SuffixMemory",
    "TokenRecycling",
    "TranslatedDraft",
    "Verified",
    "decode",
    "decode_many",
    "generate",
    "parallel",
    "prepack",
    "stream",
    "stream_many",
]
