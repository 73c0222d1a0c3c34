"""A command refuses an input or output it cannot use before its work begins, in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specjax.cli import main
from specjax.commands.files import write_json
from specjax.files.outputs import check_output, replacing_file

NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files to name; no command may go as far as to load a model."""
    (tmp_path / "good.txt").write_text("Once upon a time")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("The last word")

    def load(_: object, **options: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("specjax.load", load)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--seed", "12345678901234567890123"], "--seed: must be an integer from 0 to 42949"),
        (["x", "--seed", "9" * 5000], "--seed: must be an integer from 0 to 4294967295, got '99"),
        (["x", "--max-new-tokens", "9" * 23], "must be an integer up to 2147483647, got '999"),
        ([NOT_UTF8], r"argument text: must be UTF-8 text, got b'caf\xe9'"),
        (["x", "--stop", NOT_UTF8], r"argument --stop: must be UTF-8 text, got b'caf\xe9'"),
    ],
)
def test_arguments(folder: Path, arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate perplexity good.txt --max-tokens -400", "--max-tokens: must be at least 2, got"),
        ("evaluate fidelity prompts.jsonl --limit 0", "--limit: must be at least 1, got 0"),
        ("evaluate piqa --data . --limit -1", "--limit: must be at least 1, got -1"),
        ("bench --limit -1", "--limit: must be at least 1, got -1"),
        ("plan speed --measure --limit 0", "--limit: must be at least 1, got 0"),
    ],
)
def test_counts(folder: Path, command: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate perplexity good.txt --json folder", "folder cannot be written: it is a direct"),
        ("evaluate perplexity good.txt --json good.txt/x", "good.txt/x cannot be written: Not a"),
        ("evaluate fidelity prompts.jsonl --json /proc/x", "/proc/x cannot be written: "),
        ("evaluate fidelity prompts.jsonl --picture /proc/x.png", "/proc/x.png cannot be written"),
        ("evaluate fidelity prompts.jsonl --picture x.abc", "--picture "),
        ("evaluate piqa --data . --out good.txt/x", "good.txt/x cannot be written"),
        ("evaluate table piqa --data . --models A=tiny --out good.txt/x", "cannot be written"),
        ("plan speed --acceptance 0.5 --draft-cost 0.1 --json /proc/x", "/proc/x cannot be"),
        ("plan layers good.txt --picture good.txt/x.png", "cannot be written: Not a directory"),
        ("convert tiny-16bit good.txt/out", "good.txt/out cannot be written: Not a directory"),
        ("quantize tiny-16bit /proc/out", "/proc/out cannot be written"),
        ("export tiny good.txt/out", "good.txt/out cannot be written"),
        ("datastore build good.txt good.txt/out", "good.txt/out cannot be written"),
        ("datastore build good.txt full", "full exists and is not a datastore; give a new path"),
        ("datastore build good.txt bad.txt", "bad.txt exists and is not a datastore; give a new"),
        ("generate x --memory full", "full exists and is not a suffix memory; give a new path or"),
        ("export tiny full", "full exists; give a new path"),
        ("evaluate perplexity bad.txt", "bad.txt is not UTF-8 text"),
        ("evaluate fidelity bad.txt", "bad.txt is not UTF-8 text"),
        ("plan layers bad.txt", "bad.txt is not UTF-8 text"),
        ("plan speed --measure --prompts bad.txt", "bad.txt is not UTF-8 text"),
        ("convert tiny-16bit out --quantize gptq --calibration bad.txt", "bad.txt is not UTF-8"),
        (
            "convert tiny-16bit out --group-size 32",
            "group_size, bits, lm_head and calibration need",
        ),
        (
            "convert tiny-16bit out --length 7",
            "--sequences and --length go with --calibration FILE",
        ),
        ("quantize tiny-16bit out --sequences 0", "--sequences and --length go with --calibration"),
        ("serve --port 70000", "--port must be in 0 … 65535, got 70000"),
        ("serve --grace nan", "--grace must be in 0 … 1e+06, got nan"),
        ("serve --host 203.0.113.1", "203.0.113.1, port 8000: Cannot assign requested address"),
    ],
)
def test_outputs_and_texts(folder: Path, command: str, message: str, capsys) -> None:
    before = sorted(folder.rglob("*"))
    assert main(command.split()) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 5 GiB"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\nand pages more"),
    ],
)
def test_memory_that_runs_out(error: Exception, folder: Path, monkeypatch, capsys) -> None:
    def load(_: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("specjax.load", load)
    assert main(["generate", "x"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("specjax: memory has run out: ") and printed.count("\n") == 1


def test_what_can_be_written_is_accepted(tmp_path: Path) -> None:
    for name in ("new.json", "new/folders/out", "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        check_output(tmp_path / name, directory=name == "folder")
    check_output(Path(os.devnull))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop cannot be written: "):
        check_output(tmp_path / "loop")


def test_numbers_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "numbers.json"
    write_json(target, {"one": 1})
    target.chmod(0o600)
    with pytest.raises(KeyError), replacing_file(target) as file:
        file.write_text("half")
        raise KeyError
    assert target.read_text() == '{\n  "one": 1\n}\n'
    (tmp_path / "link").symlink_to(target)
    write_json(tmp_path / "link", [])
    assert target.read_text() == "[]\n" and target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "new", "numbers.json"]
    write_json(Path(os.devnull), {})
    assert Path(os.devnull).is_char_device()
