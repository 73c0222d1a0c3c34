"""Loads the C++ library and registers its handlers with XLA."""

from __future__ import annotations

import ctypes
import warnings
from functools import lru_cache

import jax

from pallas_kernels.cpu.library import find

WEIGHT_KINDS = (
    "Int4Weight", "Mxfp4Weight", "NestedInt8Weight", "Int8Weight",
    "Bfloat16Weight", "float32", "Bfloat12Weight",
)  # fmt: skip
HANDLERS = (
    "specjax_layers",
    "specjax_matmul",
    "specjax_attention",
    "specjax_rms_norm",
    "specjax_rotate",
    "specjax_swiglu",
    "specjax_hadamard",
    "specjax_probe_read",
    "specjax_probe_multiply",
)
_SLOW = "until then XLA alone multiplies 4-bit weights, some three to twenty times slower"


@lru_cache(maxsize=1)
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this machine can run, best first; empty without the library.

    The first call registers the handlers with XLA.
    """
    file, reason = find()
    if file is None:
        if jax.default_backend() == "cpu":
            warnings.warn(f"{reason}; {_SLOW}", RuntimeWarning, stacklevel=2)
        return ()
    library = ctypes.CDLL(str(file))
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    library.specjax_instruction_sets.restype = ctypes.c_char_p
    return tuple(library.specjax_instruction_sets().decode().split())


def check_available(what: str, instruction_set: str | None) -> None:
    """Raises ValueError unless the library was built and this machine has the instruction set."""
    if not instruction_sets():
        raise ValueError(f"{what} has no C++ library: {find().reason}")
    if instruction_set is not None and instruction_set not in instruction_sets():
        raise ValueError(
            f"instruction_set must be one of {', '.join(instruction_sets())}, "
            f"got {instruction_set!r}"
        )
