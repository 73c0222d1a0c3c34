"""Keeps finished layers on disk, so that the next run with the same input can resume.

    layer-0.safetensors …   the quantized layers
    state.safetensors       the number of layers, and the hidden states at the exit of the last one

Every file appears as a whole, and `state` appears after the layer that it counts; both are
synchronized to disk. A process killed at any moment leaves a folder from which a resumed run gives
the same bits. Where a file cannot be read all the same, the run begins anew. When a run has made
the checkpoint, it also removes the folders of abandoned runs with other options.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from checkpoints_tools.checkpoint import put_together, take_apart
from specjax.files.locks import abandoned, try_lock
from specjax.model.layers import Layer
from specjax.model.weight_names import layer_from_weights, layer_weights

STATE = "state.safetensors"


class WorkingFolder:
    """A folder that one process at a time works in.

    Args:
      out: the checkpoint that is being made; the folder lies beside it.
      key: everything that decides the result. Each `repr` of a key has its own folder.

    Raises:
      ValueError: another process is using the folder.
    """

    def __init__(self, out: Path, key: object) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        self._prefix = f".{out.name}.quantize-"
        self.path = out.resolve().parent / (self._prefix + digest)
        self._held = self._locked(out)

    @property
    def holds_layers(self) -> bool:
        """Whether a layer is finished."""
        return (self.path / STATE).exists()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def restore(self) -> tuple[list[Layer], jax.Array | None]:
        """The finished layers, and the hidden states at the exit of the last one or None."""
        if self.holds_layers:
            try:
                return self._finished()
            except (SafetensorError, FileNotFoundError):
                (self.path / STATE).unlink()
        return [], None

    def keep(self, index: int, layer: Layer, hidden: jax.Array | None) -> None:
        """Adds a finished layer."""
        weights = dict(layer_weights(layer, index))
        arrays, formats = take_apart(weights.items())
        _write(self._layer(index), arrays, {name: formats.get(name) for name in weights})
        _write(self.path / STATE, {} if hidden is None else {"hidden": hidden}, index + 1)

    def close(self, *, remove: bool) -> None:
        """Ends the work in this folder. The kept layers stay for the next run.

        With `remove`, the folder is removed, and so are the folders with other keys that no process
        is using.
        """
        if remove or not self.holds_layers:
            _remove(self.path)
        os.close(self._held)
        for other in abandoned(self._others()) if remove else ():
            _remove(other)

    def give_up(self) -> None:
        """Ends the work, and keeps nothing."""
        _remove(self.path)
        os.close(self._held)

    def _finished(self) -> tuple[list[Layer], jax.Array | None]:
        state, count = _read(self.path / STATE)
        layers = []
        for index in range(count):
            arrays, formats = _read(self._layer(index))
            weights = {name: put_together(name, formats[name], arrays) for name in formats}
            layers.append(layer_from_weights(weights, index))
        return layers, state.get("hidden")

    def _locked(self, out: Path) -> int:
        """Makes the folder unless it is there, and locks it."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # its last run ended and removed it
                lock = try_lock(self.path)
                if lock is None:
                    raise ValueError(f"another process is making {out} already")
                return lock

    def _others(self) -> Iterator[Path]:
        """The other folders in which the same checkpoint was being made."""
        pattern = re.compile(re.escape(self._prefix) + "[0-9a-f]{12}")
        return (path for path in self.path.parent.iterdir() if pattern.fullmatch(path.name))

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index}.safetensors"


def _remove(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)  # first: no run shall look for the layers it counts
    shutil.rmtree(folder)


def _write(path: Path, arrays: Mapping[str, jax.Array], description: Any) -> None:
    """Writes arrays and a JSON value as one file, whole or not at all."""
    data = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        metadata={"description": json.dumps(description)},
    )
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> tuple[dict[str, jax.Array], Any]:
    """Reads a file that `_write` wrote."""
    with safe_open(path, framework="numpy") as file:
        arrays = {name: jax.device_put(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["description"])
