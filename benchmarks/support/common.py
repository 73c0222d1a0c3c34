"""Shared by all benchmarks: where they ran, real prompts, and a JSON file for the result."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.support.tables import ROOT as ROOT
from benchmarks.support.tables import table as table
from specjax.bench import environment as place

COMMIT = place.commit() or "unknown commit"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    default = os.environ.get("SPECJAX_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default), help="folder of real data")
    parser.add_argument("--json", type=_result, help="write the result here")
    return parser


def _result(path: str) -> Path:
    """The file for the result, refused before a long run rather than after it."""
    try:
        refuse_dirty()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(path)


def refuse_dirty() -> None:
    """Raises ValueError where the tree has changes that no commit holds."""
    if COMMIT.endswith("-dirty"):
        raise ValueError(
            f"a result must name a commit that holds its code, got {COMMIT!r}: commit your changes "
            "first, or leave out --json"
        )


def environment() -> dict[str, Any]:
    """Machine, versions and commit."""
    return place.environment() | {"commit": COMMIT}


def command() -> str:
    """The command as typed, without the places of data and result; other files by bare names."""
    spec = sys.modules["__main__"].__spec__
    given = [word.split("=", 1) if word.startswith("--") else [word] for word in sys.argv[1:]]
    words, kept = chain.from_iterable(given), []
    for word in words:
        if word in ("--data", "--json"):
            next(words)
        else:
            kept.append(Path(word).name if word.startswith(("/", "~", ".")) else word)
    return shlex.join(["python", "-m", spec.name if spec else Path(sys.argv[0]).stem, *kept])


def write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows with their environment and command, if a file was asked for.

    Raises:
      ValueError: the tree has uncommitted changes.
    """
    if path is not None:
        refuse_dirty()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        head = f'"environment": {json.dumps(environment(), indent=1)},\n "command": '
        path.write_text(f'{{{head}{json.dumps(command())},\n "rows": [\n  {lines}\n]}}\n')


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows that the same command with this commit on this machine left behind, or none.

    Raises:
      SystemExit: the file holds rows of another command, which would be mixed with these.
    """
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["environment"] != environment():
        return []
    if found["command"] != command():
        raise SystemExit(f"{path} holds rows of {found['command']!r}: give --json another file")
    return list(found["rows"])


def text_prompts(data: Path, kind: str, count: int) -> list[str]:
    """`count` real prompts of a kind: "arithmetic", "python", "chat" or "prose"."""
    if kind == "arithmetic":
        items = _jsonl(data / "prompts" / "gsm8k_test.jsonl", count)
        return [f"Question: {item['question']}\nAnswer:" for item in items]
    if kind == "python":
        return [item["prompt"] for item in _jsonl(data / "prompts" / "humaneval.jsonl", count)]
    if kind == "chat":
        return [item["turns"][0] for item in _jsonl(data / "prompts" / "mt_bench.jsonl", count)]
    if kind == "prose":
        text = (data / "texts" / "wikitext2_valid.txt").read_text()
        paragraphs = [p.strip() for p in text.split("\n") if len(p) > 400]
        return [" ".join(p.split()[:30]) for p in paragraphs[:count]]
    raise ValueError(f"kind must be arithmetic, python, chat or prose, got {kind!r}")


def _jsonl(path: Path, count: int) -> list[dict[str, Any]]:
    with path.open() as lines:
        return [json.loads(line) for _, line in zip(range(count), lines, strict=False)]


def pad(prompts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as a right-padded array int32[B, width] and their lengths int32[B]."""
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def sampled(temperature: float) -> dict[str, Any]:
    """The options of a decode at this temperature; none at zero, which is greedy."""
    if not temperature:
        return {}
    return {"sampling": specjax.Sampling(temperature=temperature), "key": jax.random.key(0)}
