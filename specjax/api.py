"""The public names of specjax, which `specjax` itself finds here when the first is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specjax import planning
from specjax.drafting import (
    Adaptive,
    Autoregressive,
    Combined,
    Drafter,
    DraftModel,
    Heuristic,
    LayerSkip,
    Lookahead,
    MultiLevel,
    NGram,
    PromptLookup,
    QSpec,
    Retrieval,
    Spectra,
    TranslatedDraft,
)
from specjax.drafting.datastore import Datastore
from specjax.generation.batching import Completion, decode_many
from specjax.generation.decoding import DecodeResult, decode
from specjax.generation.text import generate, stream
from specjax.model import parallel
from specjax.model.config import ModelConfig, RopeScaling
from specjax.model.params import Params, prepack
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import Stats

if TYPE_CHECKING:
    from checkpoints_tools.checkpoint import save
    from checkpoints_tools.conversion import convert, quantize_checkpoint
    from checkpoints_tools.exporting import export
    from checkpoints_tools.loading import load, load_tokenizer
    from checkpoints_tools.quantization import quantize
    from checkpoints_tools.quantization.calibration import calibration_tokens

__all__ = [
    "Adaptive",
    "Autoregressive",
    "Combined",
    "Completion",
    "Datastore",
    "DecodeResult",
    "DraftModel",
    "Drafter",
    "Heuristic",
    "LayerSkip",
    "Lookahead",
    "ModelConfig",
    "MultiLevel",
    "NGram",
    "Params",
    "PromptLookup",
    "QSpec",
    "Retrieval",
    "RopeScaling",
    "Sampling",
    "Spectra",
    "Stats",
    "TranslatedDraft",
    "calibration_tokens",
    "convert",
    "decode",
    "decode_many",
    "export",
    "generate",
    "load",
    "load_tokenizer",
    "parallel",
    "planning",
    "prepack",
    "quantize",
    "quantize_checkpoint",
    "save",
    "stream",
]

# Found when first used: most stand on this package, and need libraries that decoding does not.
_TOOLS = {
    "calibration_tokens": "checkpoints_tools.quantization.calibration",
    "convert": "checkpoints_tools.conversion",
    "export": "checkpoints_tools.exporting",
    "load": "checkpoints_tools.loading",
    "load_tokenizer": "checkpoints_tools.loading",
    "quantize": "checkpoints_tools.quantization",
    "quantize_checkpoint": "checkpoints_tools.conversion",
    "save": "checkpoints_tools.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(import_module(_TOOLS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_TOOLS})
