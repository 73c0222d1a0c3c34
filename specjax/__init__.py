"""Exact speculative decoding with quantized models, as pure JAX functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specjax.version import __version__ as __version__

if TYPE_CHECKING:
    from specjax.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """The public names are imported when the first of them is used.

    JAX takes a second to import. A command must hear Ctrl-C before that second begins.
    """
    api = import_module("specjax.api")
    return globals()[name] if name in globals() else getattr(api, name)


def __dir__() -> list[str]:
    return dir(import_module("specjax.api"))
