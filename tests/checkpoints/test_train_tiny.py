"""The training script learns, survives being killed, and exports its model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from checkpoints_tools import tiny_corpus, train_tiny
from checkpoints_tools.tiny_model import PRESETS, Llama, LlamaConfig, hf_tensors

MICRO = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, vocab_size=300, max_position_embeddings=32,
)  # fmt: skip
STORY = "The cat sat on the mat and the dog ran to the hill. It was a fine day.\n\n"


class KilledError(Exception):
    """Stands for SIGKILL: nothing of the run is saved after it."""


def write_corpus(data: Path) -> None:
    """A synthetic corpus in the layout of the real one."""
    texts, prompts = data / "texts", data / "prompts"
    texts.mkdir(parents=True)
    prompts.mkdir()
    titles = ("THE CAT", "THE DOG", "THE HILL")
    tales = "".join(f"{title}\n\n\n{STORY * 20}\n\n\n" for title in titles)
    (texts / "GrimmsFairyTales.txt").write_text(tales, encoding="utf-8")
    chapters = "".join(f"## Chapter {i}\r\n\r\n{STORY * 10}\r\n" for i in range(5))
    with gzip.open(texts / "classic_books.jsonl.gz", "wt", encoding="utf-8") as file:
        for path in ("Aesop/Fables.md", "H.G. Wells/Time.md"):
            file.write(json.dumps({"path": path, "text": f"# T\n-------\n{chapters}"}) + "\n")
    rows = [{"question": f"What is {i} + 1?", "answer": f"<<{i}+1>>{i + 1}"} for i in range(200)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (prompts / "gsm8k_train.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The corpus and, as long as this file's tests run, the preset `micro`."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    write_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "micro", MICRO)
        patch.setattr(tiny_corpus, "PYTHON_CHARACTERS", 30_000)
        yield folder


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert start(data, out) == 0
    return out


def start(data: Path, out: Path, *more: str) -> int:
    """The exit status of the script for a run of 20 steps, or for the rest of it."""
    options = ["--data", str(data), "--out", str(out), "--preset", "micro", "--steps", "20"]
    return train_tiny.main([*options, "--save-every", "10", *more])


def full_precision(out: Path) -> dict:
    plan = train_tiny.Plan(20, 8, MICRO.max_position_embeddings, "muon")
    return train_tiny.TrainingRun(MICRO, plan, out).state["params"]


@pytest.mark.exhaustive
def test_loss_falls(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    for kind in tiny_corpus.KINDS[:3]:
        assert records[-1]["validation"][kind] < np.log(MICRO.vocab_size) - 0.1


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_to_identical_parameters(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = train_tiny.Batches.__call__

    def die_at_13(batches: train_tiny.Batches, step: int) -> np.ndarray:
        if step == 13:
            raise KilledError
        return original(batches, step)

    with monkeypatch.context() as patch:
        patch.setattr(train_tiny.Batches, "__call__", die_at_13)
        with pytest.raises(KilledError):
            start(data, tmp_path)
    assert start(data, tmp_path) == 0
    same = jax.tree.map(np.array_equal, full_precision(whole), full_precision(tmp_path))
    assert jax.tree.all(same)


@pytest.mark.exhaustive
def test_the_export_reads_back(whole: Path) -> None:
    config = json.loads((whole / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_size"] == MICRO.hidden_size
    tensors = load_file(whole / "hf" / "model.safetensors")
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)
    params = full_precision(whole)
    for name, value in hf_tensors(params).items():
        assert np.array_equal(tensors.pop(name), value)
    assert not tensors


@pytest.mark.exhaustive
def test_the_tokenizer_keeps_every_byte_and_single_digits(whole: Path) -> None:
    tokenizer = Tokenizer.from_file(str(whole / "hf" / "tokenizer.json"))
    text = " naïve\r\n\t\t12345 — 猫🙂 \x00 end  "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("12345").ids) == 5
    assert tokenizer.token_to_id(tiny_corpus.END_OF_TEXT) == 0


def test_the_model_is_causal() -> None:
    model = Llama(MICRO)
    tokens = np.arange(12)[None] % 7
    params = model.init(jax.random.key(0), tokens)
    changed = tokens.copy()
    changed[0, 8:] = 99
    before, after = model.apply(params, tokens), model.apply(params, changed)
    assert np.array_equal(before[:, :8], after[:, :8])
    assert not np.array_equal(before[:, 8:], after[:, 8:])


def test_every_row_of_an_epoch_is_different_text() -> None:
    streams = {kind: np.arange(32 * 12, dtype=np.uint16) for kind in tiny_corpus.KINDS}
    batches = train_tiny.Batches(streams, train_tiny.Plan(9, 4, 32, "muon"), train_tiny.ROWS_OF_20)
    rows = np.concatenate([batches(step) for step in range(5)])
    assert rows.shape == (20, 33)
    for kind, count in train_tiny.ROWS_OF_20.items():
        mine = rows[[name == kind for name in batches.pattern]]
        assert len({row[0] for row in mine}) == count


def test_missing_text_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = train_tiny.main(["--data", str(tmp_path), "--out", str(tmp_path / "run")])
    assert status == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_resuming_with_other_settings_is_refused(
    data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(data, whole, "--rows", "4") == 1
    assert "other settings" in capsys.readouterr().err
