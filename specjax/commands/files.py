"""Files that several commands read and write: prompts, configurations, numbers, pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from specjax import checkpoint
from specjax.config import ModelConfig
from specjax.planning.memory import FORMATS

PROMPT_FIELDS = ("prompt", "question", "text", "problem")  # of a JSON line; the first there is


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, one per line: text, or JSON with one of PROMPT_FIELDS."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no valid JSON: {error}") from error
        names = [
            name
            for name in PROMPT_FIELDS
            if isinstance(fields, dict) and isinstance(fields.get(name), str)
        ]
        if not names:
            raise ValueError(
                f"line {number} of {path} has no text in any of {', '.join(PROMPT_FIELDS)}"
            )
        texts.append(fields[names[0]])
    return texts


def read_config(source: str) -> tuple[ModelConfig, str]:
    """The configuration of a model or of a Hugging Face config.json, without reading weights; and
    the format of its first matrix, "plain" where it is not quantized by this library."""
    from checkpoints_tools.huggingface_config import read_config as read_original
    from checkpoints_tools.loading import locate  # here: not every command needs its libraries

    path = Path(source).parent if Path(source).is_file() else locate(source)
    if not checkpoint.is_checkpoint(path):
        return read_original(path), "plain"
    description = checkpoint.read_description(path)
    found = description["quantized"].get("layers.0.q.weight", {}).get("format")
    config = ModelConfig.from_dict(description["model"])
    return config, found if found in FORMATS else "plain"


def write_json(path: Path | None, numbers: Any) -> None:
    """The numbers, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def check_picture(path: Path | None) -> None:
    """Raises ValueError where a picture is wanted and cannot be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib")


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
