"""A model too large for memory is refused before it is read, in a sentence that says what fits.

The same for a full disk: what a quantization leaves there would keep it full.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import specjax
from checkpoints_tools.quantization import working_folder
from specjax.cli import main
from specjax.drafting import calibration
from specjax.drafting.costs import Costs
from specjax.evaluation.likelihood import log_likelihoods
from specjax.evaluation.sliding_windows import perplexity
from specjax.generation.batch import empty_batch
from specjax.generation.request import Request
from specjax.model import room
from specjax.model.sizes import cache_bytes
from tests.support.hf_directories import write_model, write_sparse
from tests.support.random_models import quantized_model

LARGE = {  # 70 billion parameters
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
GB = 10**9


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes that are available."""
    return lambda nbytes: monkeypatch.setattr(room, "available", lambda: nbytes)


def test_control_groups_of_version_2_count_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slice/unit")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "slice/unit/memory.max", "max")
    write(groups / "slice/memory.max", 8 * GB)
    write(groups / "slice/memory.current", 5 * GB)
    write(groups / "slice/memory.stat", f"anon {GB}\ninactive_file {GB}\nactive_file {2 * GB}")
    assert min(room._groups(tmp_path)) == 6 * GB  # the system drops pages of files


def test_control_groups_of_version_1_may_be_mounted_at_the_top(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory,pids:/docker/abc\n0::/")
    top = tmp_path / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", 4 * GB)
    write(top / "memory.usage_in_bytes", 3 * GB)
    write(top / "memory.stat", f"inactive_file 5\ntotal_inactive_file {GB}")
    assert min(room._groups(tmp_path)) == 2 * GB


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert list(room._groups(tmp_path)) == []
    found = room.available()
    assert found is not None and found > 0


@pytest.mark.parametrize(
    ("available", "command", "message"),
    [
        (20, "generate x --model {}", "needs 141.11 GB .* even 4-bit weights take 39.50 GB"),
        (100, "generate x --model {}", "convert --quantize int8 makes 73.73 GB of it"),
        (50, "convert {} out", "convert --quantize rtn makes 39.50 GB of it, which would fit"),
        (20, "quantize {} out", "quantized by rtn needs 39.50 GB of memory, and 20.00 GB are av"),
        (50, "quantize {} out --quantize int8", "quantized by int8 needs 73.73 GB"),
    ],
)
def test_a_model_larger_than_memory(
    tmp_path: Path, monkeypatch, capsys, only, available: int, command: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_sparse(tmp_path / "large", **LARGE)
    only(available * GB)
    assert main(command.format(source).split()) == 1
    printed = capsys.readouterr().err
    assert re.search(message, printed) and printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_a_checkpoint_larger_than_memory(tmp_path: Path, monkeypatch, only) -> None:
    monkeypatch.setattr(room, "_SMALL", 0)
    specjax.save(quantized_model(), tmp_path / "out")
    only(1000)
    with pytest.raises(ValueError, match=r"^\S*/out needs .* and 1000 bytes are available: even"):
        specjax.load(tmp_path / "out")


def test_a_cache_and_rows_that_are_too_many(only) -> None:
    params = quantized_model()
    with pytest.raises(ValueError, match=r"^a KV cache of 1 rows of 1099511627776 slots needs"):
        specjax.decode(params, [1], cache_capacity=2**40)
    only(GB)
    wide = {"max_new_tokens": 2, "cache_capacity": 2**18}
    needs = (
        r"a KV cache of 9 rows of 262144 slots needs 1.81 GB .*: 4 rows or cache_bits=8 or cache"
    )
    with pytest.raises(ValueError, match=needs):
        specjax.decode_many(params, [[1]] * 9, rows=9, **wide)
    with pytest.raises(ValueError, match=needs):
        specjax.decode(params, [[1]] * 9, **wide)
    only(None)  # a device that does not tell
    assert len(specjax.decode_many(params, [[1]], rows=2**40, max_new_tokens=2)) == 1


def test_rows_are_refused_before_their_costs_are_measured(only, monkeypatch) -> None:
    params = quantized_model()
    monkeypatch.setattr("specjax.generation.request.settled_for_each", lambda *_: pytest.fail())
    only(GB)
    with pytest.raises(ValueError, match="a KV cache of 9 rows of 262144 slots needs"):
        empty_batch(params, Request.make(params, cache_capacity=2**18), 9, 128)


def test_costs_are_measured_with_rows_that_fit(only, monkeypatch) -> None:
    """Five rows share the measurement of eight, whose cache needs more than theirs."""
    params, rows = quantized_model(), []
    for name, value in (("_LEAST_BYTES", 0), ("_measured", {}), ("_of_model", {})):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration, "kept_files", lambda kind: None)
    monkeypatch.setattr(
        calibration, "measure_costs", lambda _, at: rows.append(at.rows) or Costs.usual(at.rows)
    )
    monkeypatch.setattr(room, "_SMALL", 0)
    only(cache_bytes(params.config, 5, 256))
    calibration.costs_of(params, 5)
    with pytest.raises(ValueError, match="a KV cache of 8 rows of 142 slots"):
        calibration.calibrate(params, 5)
    assert rows == [4]


def test_rows_of_an_evaluation_that_are_too_many(only) -> None:
    params, text = quantized_model(), [1, 2, 3] * 400_000
    only(GB // 10)
    message = (
        r"a pass over 2344 rows of 512 tokens needs .* memory, and 100.00 MB are .*: 1\d\d rows"
    )
    with pytest.raises(ValueError, match=message):
        perplexity(params, text, rows=10**9)
    with pytest.raises(ValueError, match="a pass over 10000 rows"):
        log_likelihoods(params, [([1], [2])] * 10_000, rows=10_000)


def test_a_disk_that_fills_up_is_left_as_it_was(tmp_path: Path, monkeypatch) -> None:
    source, write = write_model(tmp_path / "source"), working_folder._write

    def fail(path: Path, *rest: Any) -> None:
        if path.name.startswith("layer-1"):
            path.with_suffix(".tmp").write_text("as much as there was room for")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest)

    monkeypatch.setattr(working_folder, "_write", fail)
    with pytest.raises(
        OSError, match=r"out was not written .* up to 0.4 MB are needed and"
    ) as full:
        specjax.convert(source, tmp_path / "out", quantization="rtn", progress=False)
    assert full.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_without_room_is_noticed_at_once(tmp_path: Path, monkeypatch) -> None:
    source = write_model(tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"0.4 MB are needed and 0.1 MB are free: 0.3 MB are missing"):
        specjax.convert(source, tmp_path / "out", quantization="rtn", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
