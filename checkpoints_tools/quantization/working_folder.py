"""What a run has finished, kept on disk so that the next run with the same input goes on from it.

    layer-0.safetensors …   the quantized layers
    state.safetensors       how many they are, and the hidden states at the last one's exit

Every file takes its place whole, `state` after the layer that it counts: a process killed at any
moment leaves a folder from which the same bits follow. Folders of runs that were given up for ones
with other options go when such a one has made the checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from checkpoints_tools.checkpoint import put_together, take_apart
from specjax.model.params import Layer
from specjax.model.weight_names import layer_from_weights, layer_weights

STATE = "state.safetensors"


class WorkingFolder:
    """A folder that one process at a time works in.

    Args:
      out: what is being made; the folder lies beside it.
      key: all that decides the result, as `repr` writes it. Another key has another folder.

    Raises:
      ValueError: another process is at work there.
    """

    def __init__(self, out: Path, key: Any) -> None:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        self._prefix = f".{out.name}.quantize-"
        self.path = out.resolve().parent / (self._prefix + digest)
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.path)
        if lock is None:
            raise ValueError(f"another process is making {out} already")
        self._held = lock

    def restore(self) -> tuple[list[Layer], jax.Array | None]:
        """The finished layers, and the hidden states at the last one's exit if there are any."""
        if not (self.path / STATE).exists():
            return [], None
        state, count = _read(self.path / STATE)
        layers = []
        for index in range(count):
            arrays, formats = _read(self._layer(index))
            weights = {name: put_together(name, formats[name], arrays) for name in formats}
            layers.append(layer_from_weights(weights, index))
        return layers, state.get("hidden")

    def keep(self, index: int, layer: Layer, hidden: jax.Array | None) -> None:
        """Adds a finished layer."""
        weights = dict(layer_weights(layer, index))
        arrays, formats = take_apart(weights)
        _write(self._layer(index), arrays, {name: formats.get(name) for name in weights})
        _write(self.path / STATE, {} if hidden is None else {"hidden": hidden}, index + 1)

    def close(self, *, remove: bool) -> None:
        """Ends the work here. What was kept stays for the next run; with `remove` it goes, and so
        does what runs with other keys left, but for those that are at work."""
        if remove or not (self.path / STATE).exists():
            shutil.rmtree(self.path)
        os.close(self._held)
        for other in self._others() if remove else ():
            lock = _lock(other)
            if lock is not None:
                shutil.rmtree(other)
                os.close(lock)

    def _others(self) -> Iterator[Path]:
        """The folders beside this one in which the same thing was being made."""
        pattern = re.compile(re.escape(self._prefix) + "[0-9a-f]{12}")
        return (path for path in self.path.parent.iterdir() if pattern.fullmatch(path.name))

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index}.safetensors"


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder against other processes; None if one of them does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _write(path: Path, arrays: Mapping[str, jax.Array], description: Any) -> None:
    """Arrays and a JSON value as one file, whole or not at all."""
    data = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        metadata={"description": json.dumps(description)},
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _read(path: Path) -> tuple[dict[str, jax.Array], Any]:
    """What `_write` wrote."""
    with safe_open(path, framework="numpy") as file:
        arrays = {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["description"])
