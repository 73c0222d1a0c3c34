"""A checkpoint loads the saved model bit for bit, and readers never see a part of one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools import checkpoint
from checkpoints_tools.exporting import export
from checkpoints_tools.quantization import quantize
from specjax.files import atomic_directory, locks
from specjax.model.config import RopeScaling
from specjax.model.params import Params, stored
from specjax.model.weight_names import named_weights, params_from_weights, weight_shapes
from tests.support.random_models import CONFIG, random_model
from tests.support.random_weights import FORMATS, random_weight

ROOT = Path(__file__).resolve().parents[2]
SCALING = RopeScaling("llama3", 8.0, 128)
BF16 = dataclasses.replace(
    CONFIG, dtype="bfloat16", rope_scaling=SCALING, stop_tokens=(2, 3), sliding_window=9,
    sliding_layers=(1,), bos_id=1,
)  # fmt: skip


def anything(_: Path) -> None:
    """A check that every target passes."""


def tied(params: Params) -> Params:
    config = dataclasses.replace(params.config, tie_word_embeddings=True)
    return dataclasses.replace(params, lm_head=None, config=config)


def with_everything(params: Params) -> Params:
    """The model with every bias and norm that a family can have."""
    config = dataclasses.replace(
        params.config, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True
    )
    rng = np.random.default_rng(0)
    weights = named_weights(params) | {
        name: jnp.asarray(rng.normal(size=shape), config.dtype)
        for name, shape in weight_shapes(config).items()
        if len(shape) == 1
    }
    return params_from_weights(config, weights)


def assert_same(left: Params, right: Params) -> None:
    """Equal structure, static fields, dtypes and bits, as they are stored."""
    left, right = stored(left), stored(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


MODELS: dict[str, Callable[[], Params]] = {
    "float32": random_model,
    "bfloat16": lambda: random_model(BF16),
    "tied": lambda: tied(random_model(BF16)),
    "quantized": lambda: quantize(random_model(BF16), group_size=32),
    "per channel, with head": lambda: quantize(tied(random_model()), group_size=None, lm_head=True),
    "every bias and norm": lambda: quantize(with_everything(random_model())),
}


@functools.cache
def model(name: str) -> Params:
    """One of MODELS, made when first asked for."""
    return MODELS[name]()


@contextlib.contextmanager
def no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails if the block warns or logs a warning."""
    caplog.clear()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        yield
    assert not caplog.records


# load(save(params)) is params: values, dtypes, formats, configuration; and without a warning.
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with no_warnings(caplog):
        checkpoint.save(model(name), tmp_path / "out")
        assert_same(checkpoint.load(tmp_path / "out"), model(name))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]


# Values that arithmetic would change come back too: NaN with its payload, infinities, -0.
# Every format of weight, with and without its optional parts, in a model that mixes them.
@pytest.mark.exhaustive
def test_round_trip_of_every_format(tmp_path: Path) -> None:
    params = random_model()
    shapes = [linear.weight.shape for linear in params.linears()]
    for name in FORMATS:
        replaced = iter([random_weight(name, n, k) for n, k in shapes])
        weights = {
            key: next(replaced) if len(shape) == 2 and key.startswith("layers") else weight
            for (key, weight), shape in zip(
                named_weights(params).items(), weight_shapes(params.config).values(), strict=True
            )
        }
        mixed = params_from_weights(params.config, weights)
        checkpoint.save(mixed, tmp_path / name)
        assert_same(checkpoint.load(tmp_path / name), mixed)


def test_round_trip_of_bits(tmp_path: Path) -> None:
    params = model("bfloat16")
    bits = np.arange(96 * 64, dtype=np.uint16).reshape(96, 64) * 11
    embedding = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    params = dataclasses.replace(params, embedding=embedding)
    checkpoint.save(params, tmp_path / "out")
    assert_same(checkpoint.load(tmp_path / "out"), params)


# A process with one device reads a checkpoint that several devices wrote.
def test_load_does_not_need_the_writers_devices(tmp_path: Path) -> None:
    script = """
import sys, jax, dataclasses
from jax.sharding import NamedSharding, PartitionSpec
from checkpoints_tools import checkpoint
params = checkpoint.load(sys.argv[1])
mesh = jax.make_mesh((4,), ("x",))
embedding = jax.device_put(params.embedding, NamedSharding(mesh, PartitionSpec("x")))
checkpoint.save(dataclasses.replace(params, embedding=embedding), sys.argv[2])
"""
    params = quantize(random_model(), group_size=64)
    checkpoint.save(params, tmp_path / "one")
    paths = [str(tmp_path / "one"), str(tmp_path / "four")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", script, *paths], check=True, env=environment)
    assert_same(checkpoint.load(tmp_path / "four"), params)


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    others = ("chat_template.json", "model.safetensors")  # the first is of models that see images
    for name in ("tokenizer.json", "generation_config.json", *others):
        (source / name).write_text(name)
    checkpoint.save(model("tied"), tmp_path / "out", tokenizer_dir=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "weights", "tokenizer.json", "generation_config.json"}


# A link into the directory or its Hugging Face cache is followed, and the copy is a file.
@pytest.mark.parametrize("place", ["model/original/t.json", "blobs/0123"])
def test_links_within_a_model_are_followed(tmp_path: Path, place: str) -> None:
    source, file = tmp_path / "snapshots" / "model", tmp_path / "snapshots" / place
    if place.startswith("blobs"):
        file = tmp_path / place
    for folder in (source, file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    (source / "tokenizer.json").symlink_to(os.path.relpath(file, source))
    (tmp_path / "link").symlink_to(source)
    checkpoint.save(model("tied"), tmp_path / "out", tokenizer_dir=tmp_path / "link")
    copied = tmp_path / "out" / "tokenizer.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


# A stranger's directory does not choose which private file goes into the checkpoint.
@pytest.mark.parametrize("link", ["../id_rsa", "../blobs/id_rsa", "original/id_rsa"])
def test_links_out_of_a_model_are_refused(tmp_path: Path, link: str) -> None:
    source = tmp_path / "clone" / "model"
    for folder in (source, tmp_path / "clone" / "blobs", tmp_path / "private"):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in ("private", "clone", "clone/blobs"):
        (tmp_path / folder / "id_rsa").write_text("secret")
    (source / "original").symlink_to(tmp_path / "private")
    (source / "merges.txt").symlink_to(link)
    for out in (checkpoint.save, export):
        with pytest.raises(ValueError, match=r"merges\.txt is a link to .*/id_rsa, which lies out"):
            out(model("float32"), tmp_path / "out", tokenizer_dir=source)
    assert not (tmp_path / "out").exists()


def test_newer_version_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint.save(model("tied"), out)
    description = json.loads((out / "config.json").read_text())
    newer = {"specjax_format": description["specjax_format"] + 1, "shape": "unheard of"}
    (out / "config.json").write_text(json.dumps(newer))
    with pytest.raises(ValueError, match="has checkpoint format 2; this version of specjax reads"):
        checkpoint.load(out)


def test_load_refusals(tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"specjax_format": 1}')
    with pytest.raises(
        ValueError, match=r"config\.json of .*/damaged is damaged: model must be an"
    ):
        checkpoint.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a specjax checkpoint"):
        checkpoint.load(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
@pytest.mark.parametrize("damage", ["all weights", "one file", "half a file"])
def test_damaged_weights_are_one_sentence(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    checkpoint.save(model("float32"), out)
    largest = max((out / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    if damage == "all weights":
        shutil.rmtree(out / "weights")
    elif damage == "one file":
        largest.unlink()
    else:
        os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"the weights of .* cannot be read: ") as refusal:
        checkpoint.load(out)
    assert "\n" not in str(refusal.value)
    gc.collect()  # what Orbax leaves unfinished complains now and not in another test


# Saving replaces checkpoints and fills empty directories, nothing else.
def test_save_replaces_checkpoints_only(tmp_path: Path) -> None:
    other = tmp_path / "notes"
    other.mkdir()
    checkpoint.save(model("tied"), other)
    checkpoint.save(model("float32"), other)
    assert_same(checkpoint.load(other), model("float32"))
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "diary.txt").write_text("dear diary")
    for path in (kept, kept / "diary.txt"):
        with pytest.raises(ValueError, match="exists and is not a specjax checkpoint"):
            checkpoint.save(model("tied"), path)
    assert (kept / "diary.txt").read_text() == "dear diary"


# A file that appears at the path while a checkpoint is written stays; no checkpoint is made.
def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch) -> None:
    out, take_apart = tmp_path / "out", checkpoint.take_apart

    def meanwhile(weights: object) -> object:
        out.mkdir()
        (out / "diary.txt").write_text("dear diary")
        return take_apart(weights)

    monkeypatch.setattr(checkpoint, "take_apart", meanwhile)
    with pytest.raises(ValueError, match="out exists and is not a specjax checkpoint; give a new"):
        checkpoint.save(model("tied"), out)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "diary.txt"]


# A write that fails midway leaves the old checkpoint and nothing else.
@pytest.mark.parametrize("full", ["before", "while writing"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    out = tmp_path / "out"
    checkpoint.save(model("tied"), out)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if full == "before":
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    else:
        monkeypatch.setattr(checkpoint, "take_apart", fail)
    with pytest.raises(OSError, match=r"^the disk is full: .*/out was not written") as failure:
        checkpoint.save(model("float32"), out)
    assert failure.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same(checkpoint.load(out), model("tied"))


def test_a_reader_never_misses_it(tmp_path: Path) -> None:
    first, second, target = (tmp_path / name for name in ("first", "second", "target"))
    for path in (first, second, target):
        path.mkdir()
    if not atomic_directory._exchange(first, second):
        pytest.skip("this file system cannot exchange two names")
    looks, missed, done = 0, 0, threading.Event()

    def look() -> None:
        nonlocal looks, missed
        while not done.is_set():
            looks, missed = looks + 1, missed + (not target.exists())

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(100):
            with atomic_directory.replacing(target, anything) as directory:
                (directory / "number").write_text(str(number))
    finally:
        done.set()
        reader.join()
    assert looks > 100 and not missed
    assert (target / "number").read_text() == "99"


# Without an exchange of names, there is a moment when only the backup exists; it is restored.
def test_recovery_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(atomic_directory, "_exchange", lambda *_: False)
    checkpoint.save(model("tied"), out)
    checkpoint.save(model("float32"), out)
    assert_same(checkpoint.load(out), model("float32"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    out.rename(tmp_path / ".out.specjax-backup")
    assert_same(checkpoint.load(out), model("float32"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Reading removes and moves nothing beside a checkpoint; the next write removes a stale backup.
def test_reading_removes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint.save(model("tied"), out)
    neighbours = [tmp_path / name for name in (".out.old", ".out.specjax-backup", ".out.tmp-dead")]
    for path in neighbours:
        path.mkdir()
        (path / "diary.txt").write_text("dear diary")
    assert_same(checkpoint.load(out), model("tied"))
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "absent")
    assert all((path / "diary.txt").read_text() == "dear diary" for path in neighbours)
    checkpoint.save(model("tied"), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.old", "out"]
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(out)
    assert neighbours[0].is_dir()


# The next run removes the directories of killed runs, but not one that is still being written.
def test_abandoned_directories_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.tmp-dead").mkdir()
    (tmp_path / ".out.tmp-dead" / "weights").write_text("half")
    with atomic_directory.replacing(tmp_path / "out", anything) as alive:
        with atomic_directory.replacing(tmp_path / "out", anything) as second:
            (second / "file").write_text("second")
        assert alive.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "out"]
        (alive / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# A directory that another process removes before it is locked is made again.
@pytest.mark.parametrize("moment", ["locked", "opened", "removed"])
def test_taken_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    lock, taken = atomic_directory.try_lock, []

    def flock(*_: object) -> None:
        if moment == "locked":
            raise BlockingIOError
        shutil.rmtree(taken[0])

    def late(path: Path) -> int | None:
        if taken:
            return lock(path)
        taken.append(path)
        if moment == "removed":
            path.rmdir()
            return lock(path)
        with monkeypatch.context() as patch:
            patch.setattr(locks.fcntl, "flock", flock)
            return lock(path)

    monkeypatch.setattr(atomic_directory, "try_lock", late)
    with atomic_directory.replacing(tmp_path / "out", anything) as directory:
        assert [directory] != taken
        (directory / "file").write_text("whole")
    assert (tmp_path / "out" / "file").read_text() == "whole"


# On file systems without locks, writing works and keeps directories that may still be in use.
def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    (tmp_path / ".out.tmp-other").mkdir()
    with atomic_directory.replacing(tmp_path / "out", anything) as directory:
        (directory / "file").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp-other", "out"]
