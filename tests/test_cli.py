"""The command line: what it prints, and one sentence with exit status 1 when it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specjax.cli import main

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs of these tests are shared among them and kept out of the user's cache."""
    base = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))


def _generate(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "Once upon a time", "--max-new-tokens", "24", *options]) == 0
    return capsys.readouterr().out


def test_generate_prints_text_and_what_it_took(capsys) -> None:
    out = _generate(capsys)
    assert out.startswith("Once upon a time")
    assert re.search(r"\d+ tokens in \d+ rounds .*drafts accepted .*tokens/s", out)


def test_drafting_does_not_change_the_text(capsys) -> None:
    texts = [
        _generate(capsys, *options).rsplit("\n\n", 1)[0]
        for options in ([], ["--drafter", "autoregressive"], ["--activation", "a4"])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_trace_marks_every_token(capsys) -> None:
    plain, traced = _generate(capsys), _generate(capsys, "--trace", "--activation", "a4")
    body = traced.rsplit("\n\n", 1)[0]
    kept = re.sub(r"\[-.*?-\]", "", body, flags=re.DOTALL)
    kept = re.sub(r"\{\+(.*?)\+\}", r"\1", kept, flags=re.DOTALL)
    assert kept == plain.rsplit("\n\n", 1)[0]
    assert "{+" in body


def test_sampling_follows_the_seed(capsys) -> None:
    runs = [_generate(capsys, "--temperature", "1", "--seed", seed) for seed in ("1", "1", "2")]
    texts = [run.rsplit("\n\n", 1)[0] for run in runs]
    assert texts[0] == texts[1] != texts[2]


def test_a_16_bit_model_is_quantized_on_request(capsys) -> None:
    out = _generate(capsys, "--model", "tiny-16bit", "--quantize", "rtn")
    assert out.rsplit("\n\n", 1)[0] == _generate(capsys).rsplit("\n\n", 1)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "no/such/place"], "no/such/place"),
        (["generate", "", "--model", "tiny"], "prompt is empty"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["generate", "x", "--draft-length", "0"], "draft_length must be at least 1, got 0"),
        (["generate", "x", "--temperature", "-1"], "temperature must be positive"),
        (["generate", "x", "--model", "tiny-16bit"], "specjax.quantize"),
        (["convert", "no/such/place", "out"], "no/such/place"),
        (
            [
                "convert",
                str(GOLDEN / "llama2"),
                "out",
                "--quantization",
                "rtn",
                "--group-size",
                "7",
            ],
            "group_size",
        ),
    ],
)
def test_one_sentence_and_exit_status_1(arguments, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("specjax: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "something was left behind"
