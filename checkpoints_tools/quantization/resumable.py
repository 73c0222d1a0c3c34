"""A quantization that can be killed and resumed.

Every finished layer waits in a folder beside the target (`working_folder`) until the checkpoint is
whole. A run that was killed goes on after its last finished layer when it is started again with the
same source and options, and its result is the same bit for bit.
"""

from __future__ import annotations

import resource
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from checkpoints_tools.quantization.layerwise import Watcher
from checkpoints_tools.quantization.recipe import Recipe
from checkpoints_tools.quantization.working_folder import WorkingFolder
from pallas_kernels import cpu
from pallas_kernels.cpu.native import instruction_sets
from specjax.files import interruption
from specjax.files.disk_space import is_disk_full, room_for
from specjax.model.config import ModelConfig
from specjax.model.layers import LINEARS, Layer
from specjax.version import __version__


class ResumableRun(Watcher):
    """Keeps finished layers in a folder and shows the progress.

    This is a context manager. The folder is removed when the block ends; if the block raises, the
    folder stays for the next run, unless it is what fills the disk.

    Args:
      out: the checkpoint that is being made.
      key: everything that decides the result (`run_key`).
      config: the model's.
      recipe: the method.
      tokens: int32[S, T], the calibration text, or None.
      progress: show a bar with the time that is left and the peak memory.
      nbytes: the quantized model's bytes, for which the disk must have room twice.

    Raises:
      ValueError: another process is making `out`.
      OSError: the disk has no room.
    """

    def __init__(
        self,
        out: Path,
        key: tuple[Any, ...],
        config: ModelConfig,
        recipe: Recipe,
        tokens: np.ndarray | None,
        progress: bool,
        nbytes: int,
    ) -> None:
        self._out, self._key, self._nbytes = out, key, nbytes
        self._layers, self._done = config.num_layers, 0
        self._stack = ExitStack()
        sequences = 0 if tokens is None else len(tokens)
        self._steps = len(LINEARS) + recipe.has("awq") + 2 * sequences  # per layer
        self._bar = tqdm(
            total=config.num_layers * self._steps,
            disable=not progress,
            smoothing=0,
            bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} gone, {remaining} left{postfix}",
        )

    def __enter__(self) -> ResumableRun:
        with interruption.undisturbed():
            self._folder = WorkingFolder(self._out, self._key)
            self._stack.enter_context(interruption.unfinished(self._undo))
        try:
            room = max(2 * self._nbytes - self._folder.nbytes, 0)
            self._stack.enter_context(room_for(self._out, room))
        except BaseException:
            self._close(keep=True)
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if is_disk_full(error):
            self._bar.close()
            self._folder.give_up()
        else:
            self._close(keep=kind is not None)
        return self._stack.__exit__(kind, error, traceback)

    def _close(self, *, keep: bool) -> None:
        self._bar.close()
        self._folder.close(remove=not keep)

    def _undo(self) -> str | None:
        """Keeps the finished layers of a run that is told to end, and says so."""
        if not self._folder.holds_layers:
            interruption.discard(self._folder.path)
            return None
        kept = f"{self._done} of {self._layers} layers are kept in {self._folder.path}"
        return f"{kept}, and the same command goes on from there"

    def step(self, what: str) -> None:
        self._bar.set_postfix_str(f"peak {_peak_memory() / 1e9:.2f} GB, {what}", refresh=False)
        self._bar.update()

    def restore(self) -> tuple[list[Layer], jax.Array | None]:
        layers, hidden = self._folder.restore()
        self._done = len(layers)
        self._bar.initial = self._bar.n = self._done * self._steps
        return layers, hidden

    def keep(self, index: int, layer: Layer, hidden: jax.Array | None) -> None:
        self._folder.keep(index, layer, hidden)
        self._done = index + 1


def run_key(
    source: Path, config: ModelConfig, recipe: Recipe, lm_head: bool, tokens: np.ndarray | None
) -> tuple[Any, ...]:
    """Everything that decides the result of a run.

    The sizes and times of its files represent the source. The machine counts as far as sums depend
    on it.
    """
    source = source.resolve()
    files = sorted(
        file
        for file in source.rglob("*")  # without hidden ones: a working folder may lie there too
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(source).parts)
    ) or [source]  # a GGUF file
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = None if tokens is None else (tokens.shape, tokens.tobytes())
    program = __version__, jax.__version__, jax.default_backend(), cpu.available()
    machine = instruction_sets() if cpu.available() else ()
    return stamps, config, recipe, lm_head, text, program, machine


def _peak_memory() -> int:
    """The most bytes of memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
