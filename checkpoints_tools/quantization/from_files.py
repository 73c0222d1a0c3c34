"""`quantize_checkpoint`: from a model on disk to a quantized checkpoint, layer by layer.

The source is read as it is needed, and every finished layer waits in a folder beside the target
(`working_folder`) until the checkpoint is whole. A run that was killed goes on after its last
finished layer when it is started again with the same source and options, and its result is the
same bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from checkpoints_tools import checkpoint
from checkpoints_tools.conversion import collect
from checkpoints_tools.huggingface import open_checkpoint
from checkpoints_tools.loading import locate, read
from checkpoints_tools.quantization import check_calibration
from checkpoints_tools.quantization.layerwise import Watcher, quantize_layers, quantized_config
from checkpoints_tools.quantization.recipe import Recipe
from checkpoints_tools.quantization.working_folder import WorkingFolder
from pallas_kernels import cpu
from pallas_kernels.cpu.native import instruction_sets
from pallas_kernels.formats import Weight
from specjax.model.config import ModelConfig
from specjax.model.params import LINEARS, Layer
from specjax.model.weight_names import named_weights
from specjax.version import __version__


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    method: str = "rtn",
    *,
    group_size: int | None = 128,
    bits: int = 4,
    lm_head: bool = False,
    dtype: str | None = None,
    calibration: Any = None,
    progress: bool = True,
) -> None:
    """Writes the checkpoint `out`: the model at `source`, quantized as `specjax.quantize` does.

    A process killed at any moment leaves `out` as it was, and a hidden folder beside it from which
    the next call with the same arguments goes on. Once `out` is whole, such folders of calls that
    were given up for this one are gone.

    Args:
      source: a Hugging Face directory, which is read one layer at a time; or a specjax checkpoint
        or the name of a model that ships, which are held in memory.
      out: the directory to make, or a specjax checkpoint to replace.
      method, group_size, bits, lm_head, calibration: as for `specjax.quantize`.
      dtype: as for `specjax.load`.
      progress: show a bar with the time that is left and the peak memory.

    Raises:
      FileNotFoundError: `source` or a part of it is missing.
      ValueError: an option is unknown or does not suit the model, `source` is no model that can be
        read or is quantized already, `out` is something else than a checkpoint, or another process
        is making it.
      OSError: `out` or the folder beside it cannot be written.
    """
    checkpoint.check_target(out)
    recipe = Recipe(method, group_size, bits)
    path = locate(source)
    config, weights = _open(path, dtype)
    tokens = check_calibration(recipe, calibration, config)
    folder = WorkingFolder(Path(out), _key(path, config, recipe, lm_head, tokens))
    finished = False
    try:
        with _Run(folder, config, recipe, tokens, progress) as run:
            quantized = quantize_layers(
                weights, config, recipe, lm_head=lm_head, tokens=tokens, watcher=run
            )
            params = collect(quantized, quantized_config(config, recipe, lm_head), None)
        checkpoint.save(params, out, tokenizer_dir=path)
        finished = True
    finally:
        folder.close(remove=finished)


def _open(path: Path, dtype: str | None) -> tuple[ModelConfig, Iterable[tuple[str, Weight]]]:
    """The configuration and the weights of a model on disk."""
    if checkpoint.is_checkpoint(path):
        params = read(path, dtype=dtype)
        return params.config, named_weights(params).items()
    original = open_checkpoint(path)
    config = original.config
    return config if dtype is None else dataclasses.replace(config, dtype=dtype), original.weights()


def _key(
    path: Path, config: ModelConfig, recipe: Recipe, lm_head: bool, tokens: np.ndarray | None
) -> tuple[Any, ...]:
    """What decides the result; of the source, its files' sizes and times; of the machine, what its
    sums depend on."""
    path = path.resolve()
    files = sorted(
        file
        for file in path.rglob("*")  # hidden ones are no part of a model: ours may lie there too
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = None if tokens is None else (tokens.shape, tokens.tobytes())
    program = __version__, jax.__version__, jax.default_backend(), cpu.available()
    machine = instruction_sets() if cpu.available() else ()
    return stamps, config, recipe, lm_head, text, program, machine


class _Run(Watcher):
    """Keeps finished layers in a folder and shows how far the work is."""

    def __init__(
        self,
        folder: WorkingFolder,
        config: ModelConfig,
        recipe: Recipe,
        tokens: np.ndarray | None,
        progress: bool,
    ) -> None:
        self._folder = folder
        sequences = 0 if tokens is None else len(tokens)
        self._steps = len(LINEARS) + recipe.has("awq") + 2 * sequences  # of one layer
        self._bar = tqdm(
            total=config.num_layers * self._steps,
            disable=not progress,
            smoothing=0,
            bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} gone, {remaining} left{postfix}",
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, what: str) -> None:
        self._bar.set_postfix_str(f"peak {_peak_memory() / 1e9:.2f} GB, {what}", refresh=False)
        self._bar.update()

    def restore(self) -> tuple[list[Layer], jax.Array | None]:
        layers, hidden = self._folder.restore()
        self._bar.initial = self._bar.n = len(layers) * self._steps
        return layers, hidden

    def keep(self, index: int, layer: Layer, hidden: jax.Array | None) -> None:
        self._folder.keep(index, layer, hidden)


def _peak_memory() -> int:
    """Bytes of memory that this process had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
