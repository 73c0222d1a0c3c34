"""Quantizing from disk to disk gives what quantizing in memory gives, also after being killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints_tools import checkpoint
from checkpoints_tools.conversion import quantize_checkpoint
from checkpoints_tools.loading import load
from checkpoints_tools.quantization import quantize
from checkpoints_tools.quantization.layerwise import quantize_layers
from checkpoints_tools.quantization.recipe import Recipe
from checkpoints_tools.quantization.working_folder import WorkingFolder
from specjax.model.params import Params, stored
from specjax.model.weight_names import named_weights
from tests.conftest import ROOT
from tests.support.covering import representatives
from tests.support.hf_directories import write_model
from tests.support.random_models import random_model

TOKENS = np.random.default_rng(0).integers(0, 96, (3, 24))
KILLED = """
import os, signal, sys
import numpy as np
from checkpoints_tools.conversion import quantize_checkpoint
from checkpoints_tools.quantization import resumable
from checkpoints_tools.quantization.working_folder import WorkingFolder

class Killed(WorkingFolder):
    def keep(self, index, layer, hidden):
        super().keep(index, layer, hidden)
        os.kill(os.getpid(), signal.SIGKILL)

resumable.WorkingFolder = Killed
tokens = np.load(sys.argv[3])
quantize_checkpoint(*sys.argv[1:3], "gptq", calibration=tokens, progress=False)
"""


def assert_same(one: Params, other: Params) -> None:
    one, other = stored(one), stored(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def leftovers(out: Path) -> list[Path]:
    return list(out.parent.glob(f".{out.name}.*"))


# From a Hugging Face directory, read layer by layer, and from a checkpoint, tied head included.
@pytest.mark.parametrize(
    ("method", "tied"),
    representatives(
        list(product(("rtn", "awq", "act-order+gptq", "quarot"), (False, True))),
        ("rtn", True),
        ("act-order+gptq", False),
    ),
)
def test_same_as_in_memory(tmp_path: Path, method: str, tied: bool) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=tied)
    options = {"group_size": 32, "lm_head": tied}
    if Recipe(method).needs_calibration:
        options["calibration"] = TOKENS
    quantize_checkpoint(source, tmp_path / "out", method, progress=False, **options)
    expected = quantize(load(source), method, **options)
    assert_same(load(tmp_path / "out"), expected)
    checkpoint.save(load(source), tmp_path / "converted")
    quantize_checkpoint(tmp_path / "converted", tmp_path / "out", method, progress=False, **options)
    assert_same(load(tmp_path / "out"), expected)
    assert not leftovers(tmp_path / "out")


# Killed after its first layer, a run leaves that layer behind; the next one ends with the same
# bits and leaves nothing else.
def test_killed_and_resumed(tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "source"), tmp_path / "out"
    np.save(tmp_path / "tokens.npy", TOKENS)
    command = [sys.executable, "-c", KILLED, source, out, tmp_path / "tokens.npy"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not out.exists()
    (folder,) = leftovers(out)
    assert sorted(file.name for file in folder.iterdir()) == [
        "layer-0.safetensors",
        "state.safetensors",
    ]
    quantize_checkpoint(source, out, "gptq", calibration=TOKENS, progress=False)
    assert_same(load(out), quantize(load(source), "gptq", calibration=TOKENS))
    assert not leftovers(out)


class CutError(Exception):
    pass


# The finished layers are not computed again, and the hidden states behind them are the same bits:
# from the second layer on, a run no longer needs the first one's weights.
@pytest.mark.exhaustive
def test_resumed_from_the_folder(tmp_path: Path) -> None:
    params, recipe = random_model(), Recipe("act-order+gptq", 32)
    weights = named_weights(params)

    class Run(WorkingFolder):
        breaks = True

        def step(self, what: str) -> None:
            if self.breaks and what == "layer 1: q":
                raise CutError

    def run(breaks: bool, weights: dict) -> dict:
        folder = Run(tmp_path / "out", "key")
        folder.breaks = breaks
        try:
            tokens = TOKENS.astype(np.int32)
            return dict(
                quantize_layers(
                    weights.items(), params.config, recipe, tokens=tokens, watcher=folder
                )
            )
        finally:
            folder.close(remove=False)

    with pytest.raises(CutError):
        run(True, weights)
    garbled = {
        name: weight * 0 if name.startswith("layers.0.") else weight
        for name, weight in weights.items()
    }
    expected = named_weights(
        stored(quantize(params, recipe.method, group_size=32, calibration=TOKENS))
    )
    resumed = run(False, garbled)
    assert resumed.keys() == expected.keys()
    for name, weight in expected.items():
        jax.tree.map(np.testing.assert_array_equal, resumed[name], weight)


# Another key has another folder; the same one is for one process at a time.
def test_working_folders(tmp_path: Path) -> None:
    one = WorkingFolder(tmp_path / "out", "one")
    other = WorkingFolder(tmp_path / "out", "other")
    assert one.path != other.path
    with pytest.raises(ValueError, match="another process is making"):
        WorkingFolder(tmp_path / "out", "one")
    for folder in (one, other):
        folder.close(remove=True)
    assert not leftovers(tmp_path / "out")


# A folder that its last run removes before it is locked is made again.
def test_removed_before_it_is_locked(tmp_path: Path, monkeypatch) -> None:
    first, flock = WorkingFolder(tmp_path / "out", "key"), fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close(remove=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = WorkingFolder(tmp_path / "out", "key")
    with pytest.raises(ValueError, match="another process is making"):
        WorkingFolder(tmp_path / "out", "key")
    second.keep(0, random_model().layers[0], None)
    assert second.holds_layers
    second.close(remove=True)


# A loss of power may leave a file that was renamed and is empty, cut off or gone.
@pytest.mark.parametrize("name", ["layer-0.safetensors", "state.safetensors"])
@pytest.mark.parametrize("size", [0, 100, None])
def test_a_damaged_folder_begins_anew(tmp_path: Path, name: str, size: int | None) -> None:
    folder, layer = WorkingFolder(tmp_path / "out", "key"), random_model().layers[0]
    for index in range(2):
        folder.keep(index, layer, None)
    if size is None:
        (folder.path / name).unlink()
    else:
        os.truncate(folder.path / name, size)
    assert folder.restore() == ([], None) and not folder.holds_layers
    folder.keep(0, layer, None)
    assert len(folder.restore()[0]) == 1
    folder.close(remove=True)


# A kill while the folder is removed leaves no count of layers that are gone.
def test_killed_while_the_folder_is_removed(tmp_path: Path, monkeypatch) -> None:
    folder = WorkingFolder(tmp_path / "out", "key")
    folder.keep(0, random_model().layers[0], None)

    def killed(_: Path) -> None:
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(CutError):
            folder.close(remove=True)
    assert folder.restore() == ([], None)


# Once the checkpoint is whole, the folders of abandoned runs are removed. A run that is still at
# work and the folders of checkpoints with similar names stay.
def test_given_up_folders(tmp_path: Path) -> None:
    layer = random_model().layers[0]

    def folder(name: str, key: str) -> WorkingFolder:
        working = WorkingFolder(tmp_path / name, key)
        working.keep(0, layer, None)
        return working

    given_up, at_work, done = (folder("out", key) for key in ("given up", "at work", "done"))
    namesake = folder("out.quantize-0123456789ab", "its own")
    for each in (given_up, namesake):
        each.close(remove=False)
    assert given_up.path.exists() and namesake.path.exists()
    done.close(remove=True)
    assert not given_up.path.exists() and not done.path.exists()
    assert at_work.path.exists() and namesake.path.exists()
    at_work.close(remove=True)


def test_refusals(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    for place, options, message in (
        (source, {"method": "gptq"}, "needs calibration"),
        (source, {"dtype": "float16"}, "dtype must be one of"),
        (source, {"method": "q4"}, "method must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_checkpoint(place, tmp_path / "new", progress=False, **options)
    with pytest.raises(ValueError, match="exists and is not a specjax checkpoint"):
        quantize_checkpoint(source, source, progress=False)
    with pytest.raises(FileNotFoundError, match="is not a model: give"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists() and not leftovers(tmp_path / "new")
