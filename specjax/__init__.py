"""Exact speculative decoding with quantized models, as pure JAX functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specjax.version import __version__ as __version__

if TYPE_CHECKING:
    from checkpoints_tools.checkpoint import save as save
    from checkpoints_tools.conversion import convert as convert
    from checkpoints_tools.conversion import quantize_checkpoint as quantize_checkpoint
    from checkpoints_tools.exporting import export as export
    from checkpoints_tools.loading import load as load
    from checkpoints_tools.loading import load_tokenizer as load_tokenizer
    from checkpoints_tools.quantization import quantize as quantize
    from checkpoints_tools.quantization.calibration import calibration_tokens as calibration_tokens
    from checkpoints_tools.quantization.dequantization import dequantize as dequantize
    from specjax import bench as bench
    from specjax import evaluation as evaluation
    from specjax import planning as planning
    from specjax.api import *  # noqa: F403

_ROOMS = "bench", "evaluation", "planning"
# Most stand on this package, and need libraries that decoding does not.
_TOOLS = {
    "calibration_tokens": "checkpoints_tools.quantization.calibration",
    "convert": "checkpoints_tools.conversion",
    "dequantize": "checkpoints_tools.quantization.dequantization",
    "export": "checkpoints_tools.exporting",
    "load": "checkpoints_tools.loading",
    "load_tokenizer": "checkpoints_tools.loading",
    "quantize": "checkpoints_tools.quantization",
    "quantize_checkpoint": "checkpoints_tools.conversion",
    "save": "checkpoints_tools.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when the first of them is used.

    JAX takes a second to import. A command must hear Ctrl-C before that second begins.
    """
    import_module("specjax.files.user_cache").keep_compiled_programs()
    if name in _ROOMS:
        return import_module(f"specjax.{name}")
    if name in _TOOLS:
        names = vars(import_module(_TOOLS[name]))
    else:
        names = globals() | vars(import_module("specjax.api"))
    if name == "__all__":
        names = {"__all__": sorted([*names["__all__"], *_TOOLS, *_ROOMS])}
    if name not in names:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return names[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
