"""Exact speculative decoding with quantized models, as pure JAX functions.

`decode` is the whole library in one call; `specjax.drafting` says what can draft for it.
"""

from specjax.config import ModelConfig, RopeScaling
from specjax.decoding import DecodeResult, decode
from specjax.drafting import Autoregressive, Drafter, QSpec
from specjax.params import Params
from specjax.sampling import Sampling
from specjax.state import Stats

__version__ = "0.1.0"

__all__ = [
    "Autoregressive",
    "DecodeResult",
    "Drafter",
    "ModelConfig",
    "Params",
    "QSpec",
    "RopeScaling",
    "Sampling",
    "Stats",
    "decode",
]
