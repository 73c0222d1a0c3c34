"""Files that several commands read and write: configurations, numbers, pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from checkpoints_tools import checkpoint
from specjax.files.outputs import replacing_file, write_whole
from specjax.model.config import ModelConfig
from specjax.model.sizes import FORMATS


def read_config(source: str) -> tuple[ModelConfig, str]:
    """The configuration of a model or of a Hugging Face config.json, without reading weights; and
    the format of its first matrix, "plain" for any Hugging Face directory."""
    from checkpoints_tools.gguf import held_as, open_gguf
    from checkpoints_tools.huggingface_config import read_config as read_original
    from checkpoints_tools.sources import locate  # here: not every command needs its libraries

    path = Path(source)
    path = path.parent if path.name == "config.json" and path.is_file() else locate(source)
    if path.is_file():
        model = open_gguf(path)
        return model.config, held_as(model)
    if not checkpoint.is_checkpoint(path):
        return read_original(path), "plain"
    config, formats = checkpoint.read_description(path)
    first = formats.get("layers.0.q.weight")
    found = first.get("format") if isinstance(first, dict) else None
    return config, found if found in FORMATS else "plain"


def write_json(path: Path | None, numbers: Any) -> None:
    """The numbers, if a file was asked for."""
    if path is not None:
        write_whole(path, json.dumps(numbers, indent=2) + "\n")


def check_picture(path: Path | None) -> None:
    """Raises ValueError where a picture is wanted and cannot be drawn."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"--picture must end in one of {', '.join(kinds)}, got {path}")


def save_picture(figure: Any, path: Path, **how: Any) -> None:
    """Draws a figure of matplotlib into a file, whole or not at all."""
    with replacing_file(path) as file:
        figure.savefig(file, **how)


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
