"""The costs of passes: measured once, kept on disk, and made anew where they may not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.drafting import calibration
from specjax.drafting.costs import Costs
from specjax.files.machine import CoreTimes
from tests.support.random_models import quantized_model

PARAMS = quantized_model()
FREE = Costs(np.ones(4, np.float32), np.float32(0.01))


def test_costs_are_measured_once_and_a_bad_file_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_LEAST_BYTES", 0)
    monkeypatch.setattr(calibration, "kept_files", lambda kind: tmp_path)
    times: list[tuple[int, int]] = []

    def measured(params: specjax.Params, at: calibration.Point) -> Costs:
        times.append((at.rows, at.context))
        return FREE

    def found(rows: int, context: int = 100) -> Costs:
        monkeypatch.setattr(calibration, "_measured", {})
        monkeypatch.setattr(calibration, "_of_model", {})
        return calibration.costs_of(PARAMS, rows, context=context)

    monkeypatch.setattr(calibration, "measure_costs", measured)
    for rows, context in ((3, 1), (4, 128), (4, 300), (5, 5000), (8, 10**6)):
        np.testing.assert_array_equal(found(rows, context).passes, FREE.passes)
    assert times == [(4, 128), (8, 498)]  # the model has 512 positions
    files = sorted(tmp_path.iterdir())
    whole = [json.loads(file.read_text()) for file in files]
    for text in ("", "[]", json.dumps(whole[0] | {"passes": [1, 2]}),
                 json.dumps(whole[0] | {"draft": float("nan")}),
                 json.dumps(whole[0] | {"look": -1.0}),
                 json.dumps({key: value for key, value in whole[0].items() if key != "busy"}),
                 json.dumps(whole[0] | {"measured on": "another machine"})):  # fmt: skip
        for file in files:
            file.write_text(text)
        times.clear()
        found(4), found(8, 5000)
        assert times == [(4, 128), (8, 498)], text


@pytest.mark.parametrize(
    ("look", "loops", "least"), [(0.0, False, 0), (0.01, False, 0), (0.05, True, 1), (0.2, True, 3)]
)
def test_programs_follow_from_measured_costs(
    tmp_path: Path, look: float, loops: bool, least: int
) -> None:
    """From those on disk too."""
    found = calibration._costs([1, 1.01, 1.04, 1.3], 1, look)
    calibration._write(tmp_path / "costs", "", found, busy=False)
    for each in (found, calibration._read(tmp_path / "costs", "").costs):
        assert (each.loops, each.least) == (loops, least)


def test_no_pass_takes_less_than_a_narrower_one() -> None:
    """Neighbours on the machine may slow the narrow one while it is timed."""
    found = calibration._costs([1, 0.9, 1.5, 1.4], 1, 0.0)
    np.testing.assert_array_equal(found.passes, np.array([1, 1, 1.5, 1.5], np.float32))


def test_costs_of_busy_cores_hold_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "_LEAST_BYTES", 0)
    monkeypatch.setattr(calibration, "kept_files", lambda kind: tmp_path)
    waited, times = [0.0], [0]

    def measured(params: specjax.Params, at: calibration.Point) -> Costs:
        times[0] += 1
        return FREE

    def measurements(age: int = 0) -> int:
        for file in tmp_path.iterdir():
            os.utime(file, (time.time() - age,) * 2)
        monkeypatch.setattr(calibration, "_measured", {})
        monkeypatch.setattr(calibration, "_of_model", {})
        calibration.costs_of(PARAMS, 1)
        return times[0]

    monkeypatch.setattr(calibration, "measure_costs", measured)
    monkeypatch.setattr(calibration.CoreTimes, "waited_since", lambda *_: waited[0])
    assert measurements() == measurements(age=10**6) == 1 and not caplog.records
    monkeypatch.setattr(calibration, "_measured", {})
    waited[0] = 0.7
    calibration.calibrate(PARAMS, 1)
    assert times[0] == 2 and "the cores were busy" in caplog.text
    assert measurements(age=3000) == 2 and measurements(age=4000) == 3
    waited[0] = 0.1
    assert measurements(age=4000) == measurements(age=10**6) == 4


def test_costs_of_busy_cores_hold_for_an_hour_in_their_process_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[int] = []
    for name, value in (("_LEAST_BYTES", 0), ("_measured", {}), ("_of_model", {})):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration, "kept_files", lambda kind: None)
    monkeypatch.setattr(calibration.CoreTimes, "waited_since", lambda *_: 0.7)
    monkeypatch.setattr(calibration, "measure_costs", lambda *_: times.append(1) or FREE)
    now = time.time()
    for later, measurements in ((0, 1), (3000, 1), (4000, 2), (7000, 2)):
        monkeypatch.setattr(calibration.time, "time", lambda later=later: now + later)
        calibration.costs_of(PARAMS, 1)
        assert len(times) == measurements, later


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how long threads wait")
def test_threads_wait_for_a_core_that_another_process_keeps_busy() -> None:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})  # of this thread, and of the process that it starts
    program = "print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        before, until = CoreTimes(), time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        assert CoreTimes().waited_since(before) > 0.4
    finally:
        os.sched_setaffinity(0, own)
        other.kill()
        other.communicate()


@pytest.mark.exhaustive
def test_passes_are_timed_and_nothing_is_inside_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_host_decides", lambda: True)
    found = calibration.measure_costs(PARAMS, calibration.Point(2))
    assert found.passes.shape == (4,) and found.passes[0] == 1
    assert (found.passes > 0).all() and found.draft > 0 and found.look >= 0
    monkeypatch.setattr(calibration, "_LEAST_BYTES", 0)
    monkeypatch.setattr(calibration, "_measured", {})
    monkeypatch.setattr(calibration, "_of_model", {})
    monkeypatch.setattr(calibration, "kept_files", lambda kind: None)
    inside = jax.jit(lambda x: x + calibration.costs_of(PARAMS, 2).passes.sum())
    assert float(inside(0.0)) == pytest.approx(Costs.usual(2).passes.sum())
