"""`specjax bench`: how drafters are written, what is refused, and the tables of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specjax
from specjax.cli import main
from specjax.commands.drafters import make_drafter, read_written, with_lengths
from specjax.commands.options import load_target

SMALL = ["--limit", "2", "--turns", "1", "--max-new-tokens", "8"]


def _bench(*arguments: str) -> int:
    return main(["bench", *SMALL, *arguments])


@pytest.mark.exhaustive
def test_bench_measures_and_prints_tables(tmp_path: Path, capsys) -> None:
    prompts, out = tmp_path / "tales.txt", tmp_path / "results.jsonl"
    prompts.write_text("Once upon a time\nThere was a king\nA long text that has many words " * 9)
    command = ["--drafters", "ngram", "--draft-lengths", "2", "3", "--rows", "1",
               "--prompts", str(prompts), f"again={prompts}", "--out", str(out)]  # fmt: skip
    assert _bench(*command) == 0
    table = capsys.readouterr().out
    head, *cells = map(json.loads, out.read_text().splitlines())
    assert head["rows"] == [1] and len(cells) == 2 * 3
    assert {cell["texts"] for cell in cells} == {"tales", "again"}
    assert {cell["drafter"]: cell["draft_length"] for cell in cells} == {
        "plain": 0, "ngram:draft_length=2": 2, "ngram:draft_length=3": 3
    }  # fmt: skip
    assert all(cell["identical"] == cell["prompts"] == 2 for cell in cells)
    assert main(["bench", "table", str(out)]) == 0
    assert capsys.readouterr().out == table
    assert table.count("| all |") == 3


def test_long_prompts_are_left_out(tmp_path: Path, capsys, caplog) -> None:
    prompts = tmp_path / "tales.txt"
    prompts.write_text("Once upon a time\n" + "and then and then " * 9)
    command = ["--drafters", "ngram:draft_length=2", "--prompts", str(prompts)]
    command += ["--longest-prompt", "8"]
    with caplog.at_level("INFO", logger="specjax"):
        assert _bench(*command) == 0
    assert "1 of 2 prompts of tales are left out: they have more than 8 tokens" in caplog.text
    assert _bench(*command, "--longest-prompt", "1") == 1
    assert "tales must have at least 1 prompts for a batch of 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--drafters nothing", "drafter must be one of auto, "),
        ("--drafters draft-model", "draft-model needs a model or a quantization method after it"),
        ("--drafters ngram ngram", "--drafters must be different ones, got ngram ngram"),
        ("--drafters ngram:order", "options of ngram must be written option=value, got 'order'"),
        ("--drafters ngram+mxfp4", "--draft goes with --drafter"),
        ("--drafters draft-model+nothing", "--draft names no model, and no method"),
        ("--drafters ngram --draft-lengths 0", "draft_length must be at least 1"),
        ("--drafters ngram --rows 3", "stories must have at least 3 prompts for a batch of 3"),
        ("--models tiny-16bit --drafters qspec", "holds 16-bit weights, and the qspec drafter"),
        ("--prompts missing.txt", "No such file"),
        ("--prompts a.txt b/a.txt", "--prompts must have different names, got a, a"),
        ("--models nowhere", "nowhere"),
        ("table a.txt", "a.txt does not hold results of specjax bench: give another file"),
        ("--out a.txt/x", "a.txt/x cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: str, message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    for file in ("a.txt", "b/a.txt"):
        Path(file).write_text("Once\n")
    assert _bench(*command.split()) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_lengths_are_written_into_drafters_that_have_them() -> None:
    assert with_lengths("qspec", [2, 5]) == ["qspec:draft_length=2", "qspec:draft_length=5"]
    assert with_lengths("draft-model:share_cache=true+mxfp4", [3]) == [
        "draft-model:share_cache=true,draft_length=3+mxfp4"
    ]
    for text in ("qspec:draft_length=4", "spectra:window=2", "auto"):
        assert with_lengths(text, [2, 5]) == [text]
    assert with_lengths("qspec", []) == ["qspec"]


def test_a_written_drafter_is_that_of_the_options() -> None:
    target = load_target("tiny-16bit", None, 128)
    made = make_drafter(
        read_written("draft-model:draft_length=8,2,activation=a8+mxfp4+tiny-draft"), target
    )
    assert isinstance(made, specjax.MultiLevel) and made.outer.activation == "a8"
    assert (made.outer.draft_length, made.inner.draft_length) == (8, 2)
    for text, layers in (
        ("skip-last-half", (0, 1, 2)),
        ("skip-alternate", (1, 3, 5)),
        ("0,2", (0, 2)),
    ):
        made = make_drafter(read_written(f"layer-skip:layers={text},draft_length=2"), target)
        assert made == specjax.LayerSkip(layers, 2)
    written = make_drafter(read_written("spectra:window=2,guesses=3"), target)
    assert written == specjax.Spectra(window=2, guesses=3)
