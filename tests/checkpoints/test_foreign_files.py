"""Directories that somebody else wrote: what leads out of them, and what takes for ever."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_tools import checkpoint
from checkpoints_tools.huggingface import open_checkpoint
from checkpoints_tools.tensor_files import read_headers
from specjax.checks import printable, shown
from specjax.cli import main
from specjax.files.json_lines import read_lines
from specjax.files.json_objects import MOST_BYTES, read_object
from tests.support.hf_directories import write_config, write_model
from tests.support.random_models import quantized_model

INDEX = "model.safetensors.index.json"
ESCAPE = "\x1b]0;title\x07\x1b[31m"


def with_index(path: Path, weight_map: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


# A checkpoint of two layers that claims more: no list of them is made.
@pytest.mark.parametrize("layers", [3, 10_000])
def test_layers_without_tensors_are_refused_at_once(tmp_path: Path, layers: int) -> None:
    write_model(tmp_path)
    write_config(tmp_path, num_hidden_layers=layers)
    begun = time.process_time()
    with pytest.raises(ValueError, match=f"num_hidden_layers {layers}, but there are .* 2 layers"):
        open_checkpoint(tmp_path)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../model.safetensors", "a/../../b", "", ".", "a//b", "..\\b", ESCAPE, 5, None,
     ["model.safetensors"]],
)  # fmt: skip
def test_an_index_names_files_below_its_folder(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="weight_map must name files below its folder") as refusal:
        read_headers(with_index(tmp_path, {"a": name}))
    assert str(refusal.value).isprintable()


def test_a_tensor_lies_in_one_file(tmp_path: Path) -> None:
    with_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"the tensor a is in .*/1.safetensors and in .*/2.safe"):
        read_headers(tmp_path)


@pytest.mark.parametrize("weight_map", [[], "a", 5, None])
def test_an_index_maps_names_to_files(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(ValueError, match="weight_map must be an object, got"):
        read_headers(with_index(tmp_path, weight_map))


def test_an_index_names_some_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight_map names no file"):
        read_headers(with_index(tmp_path, {}))


# The Hub's cache: a snapshot of links to ../../blobs. A shard may lie in a folder below as well.
def test_shards_may_be_links(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    (snapshot / "more").mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(open_checkpoint(snapshot).tensors) == 21
    index = json.loads((snapshot / INDEX).read_text())["weight_map"]
    (last,) = {name for name in index.values() if name.endswith("2-of-00002.safetensors")}
    (snapshot / last).rename(snapshot / "more" / last)
    (snapshot / "more" / last).unlink()
    (snapshot / "more" / last).symlink_to("../../../blobs/2")
    (snapshot / INDEX).unlink()
    with_index(snapshot, {k: f"more/{v}" if v == last else v for k, v in index.items()})
    assert len(open_checkpoint(snapshot).tensors) == 21


def test_tensors_whose_names_cannot_be_printed_are_refused(tmp_path: Path) -> None:
    save_file({f"a{ESCAPE}": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be printed: 'a\\x1b\]0;title\\x07") as refusal:
        read_headers(tmp_path)
    assert str(refusal.value).isprintable()


def test_a_pipe_is_not_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="has neither"):
        read_headers(tmp_path)


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 10**5)
    assert not checkpoint.is_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"line 1 of .* is nested too deeply to be read"):
        read_lines(file)


def test_json_that_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as out:
        out.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match="accepted: a JSON file of up to"):
        read_object(file)


# The config.json of the library's own checkpoints agrees with the arrays.
def test_contradictions_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint.save(quantized_model(group_size=64), out)
    description = json.loads((out / "config.json").read_text())
    for part, changes, message in (
        ("model", {"vocab_size": 95}, r"embedding must have shape \(95, 64\), got \(96, 64\)"),
        ("model", {"rms_norm_eps": -1}, "config.json of .* is damaged: rms_norm_eps must be a num"),
        ("weight", {"format": "int8"}, "cannot be read: 'layers.0.q.weight.integers'"),
        ("weight", {"group_size": 7}, "cannot be read: group_size must be 32, 64, 128 or None"),
        ("weight", {"group_size": 32}, r"cannot be read: scales must be .*\[96, 8\]"),
        ("weight", {"in_features": True}, "in_features of layers.0.q.weight must be an integer"),
        ("weight", {"in_features": 63}, r"layers\.0\.q\.weight must have shape \(96, 64\)"),
        ("weight", {"activation_clip": math.nan}, "activation_clip of layers.0.q.weight must be"),
    ):
        changed = copy.deepcopy(description)
        place = changed["model"] if part == "model" else changed["quantized"]["layers.0.q.weight"]
        place.update(changes)
        (out / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            checkpoint.load(out)


def test_foreign_values_are_shown_short_and_safe() -> None:
    deep: Any = []
    for _ in range(10**5):
        deep = [deep]
    assert shown(deep) == "[[[[...]]]]"
    assert shown(ESCAPE) == repr(ESCAPE)
    assert len(shown("a" * 10**6)) < 100 and len(shown([10**400] * 9)) < 500
    assert printable(ESCAPE) == r"\x1b]0;title\x07\x1b[31m"
    assert printable("Größe 大\u202e\ud800\n") == r"Größe 大\u202e\ud800\n"
    assert printable("a" * 301) == "a" * 300 + "…"


def test_a_command_prints_no_character_of_control(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", f"/nowhere/{ESCAPE}"]) == 1
    message = capsys.readouterr().err
    assert message.rstrip("\n").isprintable() and r"/nowhere/\x1b]0;title" in message
