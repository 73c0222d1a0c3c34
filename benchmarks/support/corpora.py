"""The texts of which benchmarks build datastores: problems, modules of Python, and books."""

from __future__ import annotations

import gzip
import json
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Writes the texts as JSON lines, for `datastore build`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def corpora(data: Path, sequences: int) -> dict[str, list[str]]:
    """So many shuffled texts of each kind, of about 800 characters, one sequence each."""
    with (data / "prompts" / "gsm8k_train.jsonl").open() as lines:
        problems = [json.loads(line) for line in lines]
    with gzip.open(data / "texts" / "classic_books.jsonl.gz", "rt") as lines:
        books = [json.loads(line)["text"].replace("\r", "") for line in lines]
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))]
    corpora = {
        "gsm8k": [f"Question: {each['question']}\nAnswer: {each['answer']}" for each in problems],
        "python": [piece for text in modules for piece in _pieces(text)],
        "books": [piece for text in books for piece in _pieces(text)],
    }
    shuffle = random.Random(0)
    return {name: shuffle.sample(texts, sequences) for name, texts in corpora.items()}


def _pieces(text: str) -> list[str]:
    """Cuts at ends of lines."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= 800:
            pieces.append(piece)
            piece = ""
    return pieces
