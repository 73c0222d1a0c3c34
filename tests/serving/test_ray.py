"""The examples for Ray, on a local cluster of two workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

import specjax
from tests.conftest import ROOT

pytestmark = pytest.mark.exhaustive
ray = pytest.importorskip("ray", reason="Ray is not installed")
EXAMPLES = ROOT / "examples" / "ray"


@pytest.fixture
def cluster() -> Iterator[Any]:
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{EXAMPLES}", "JAX_PLATFORMS": "cpu"}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[str]:
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "serve_replicas.py"], cwd=ROOT, stdout=log, stderr=log,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DISABLE_DOCKER_CPU_WARNING": "1"},
        start_new_session=True,
    )  # fmt: skip
    url = "http://127.0.0.1:8000/v1"
    try:
        for _ in range(600):
            if process.poll() is not None or _answers(url):
                break
            time.sleep(0.5)
        assert _answers(url), (tmp_path / "log").read_text()[-3000:]
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for each in psutil.process_iter(["name"]):
            if each.info["name"] in ("raylet", "gcs_server") or "ray::" in str(each.info["name"]):
                each.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_replicas_answer_as_one_server_does(replicas: str) -> None:
    """Streams come in pieces, and the text is that of `generate`."""
    params, tokenizer = specjax.load("tiny"), specjax.load_tokenizer("tiny")
    prompts = ["Once upon a time", "The king said", "Two dogs"]
    expected = specjax.generate(
        params, tokenizer, prompts, max_new_tokens=24, drafter=specjax.Autoregressive()
    )
    with openai.OpenAI(base_url=replicas, api_key="none") as client:
        for prompt, alone in zip(prompts, expected, strict=True):
            pieces = [
                part.choices[0].text
                for part in client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True
                )
            ]
            assert len(pieces) > 2 and "".join(pieces) == alone.text


def test_a_killed_actor_loses_nothing(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt has one result although an actor is killed while it decodes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import evaluate_in_actors as example

    prompts = [{"number": n, "prompt": f"Once upon a time there were {n}"} for n in range(40)]
    rows = cluster.data.from_items(prompts).map_batches(
        example.Decoder, batch_size=4, num_cpus=1,
        compute=cluster.data.ActorPoolStrategy(size=2),
    )  # fmt: skip
    found, killed = [], False
    for row in rows.iter_rows():
        found.append(row)
        if not killed:
            killed = _kill_an_actor()
    assert killed
    assert sorted(row["number"] for row in found) == list(range(40))
    texts = [each["prompt"] for each in prompts]
    alone = example.Decoder()({"prompt": texts})["answer"]
    assert [row["answer"] for row in sorted(found, key=lambda row: row["number"])] == alone


def _kill_an_actor() -> bool:
    for process in psutil.process_iter(["cmdline"]):
        if "ray::MapWorker" in " ".join(process.info["cmdline"] or []):
            process.kill()
            return True
    return False
