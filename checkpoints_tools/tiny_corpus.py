"""Reads, cleans, splits and tokenizes the text that the shipped tiny model is trained on.

A model of a few million parameters writes coherently only if its training text is simple and clean.
This file chooses simple books, removes their markup, and divides the text into documents of four
kinds. Everything here is a pure function of the input files: the same data always gives the same
tokenizer and token streams, so a training run can be resumed from a step number alone.
"""

from __future__ import annotations

import gzip
import json
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
KINDS = ("tales", "prose", "gsm8k", "python")
VALIDATION_SHARE = 0.01
PYTHON_CHARACTERS = 6_000_000

# Children's books and fairy tales; a trailing slash takes everything by that author.
TALES = (
    "Abbie Farwell Brown/", "Aesop/", "Anna Sewell/", "Beatrix Potter/", "Carlo Collodi/",
    "Edith Nesbit/", "Frances Hodgson Burnett/A Little Princess",
    "Frances Hodgson Burnett/The Secret Garden", "George MacDonald/The Princess and the Goblin",
    "Hans Christian Andersen/", "Hugh Lofting/", "J. M. Barrie/", "Johanna Spyri/",
    "Kenneth Grahame/", "L. Frank Baum/", "Lewis Carroll/",
)  # fmt: skip
# Prose for older readers, by authors of short sentences.
PROSE = (
    "Agatha Christie/", "Arthur Conan Doyle/", "Edgar Rice Burroughs/", "H.G. Wells/",
    "Jack London/The Call of the Wild", "Jack London/White Fang", "Jerome K. Jerome/",
    "John Buchan/The Thirty-Nine Steps", "Jules Verne/", "Louisa May Alcott/Jo's Boys",
    "Louisa May Alcott/Little", "Louisa May Alcott/An Old-Fashioned Girl", "Lucy Maud Montgomery/",
)  # fmt: skip
# Library folders of tests, generated tables or data.
SKIPPED_FOLDERS = {
    "site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data",
    "ensurepip", "turtledemo", "__pycache__",
}  # fmt: skip
TYPOGRAPHY = str.maketrans({
    "‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...",
    "\xa0": " ", "\u200b": None, "\ufeff": None, "_": None, "*": None, "\\": None,
})  # fmt: skip


class RunError(Exception):
    """The run cannot continue. The message is one sentence for the user."""


def clean_prose(text: str) -> str:
    """The text with ASCII punctuation, without emphasis marks, with one line per paragraph."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).translate(TYPOGRAPHY)
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if re.search(r"\w", p))


def split_markdown_book(text: str) -> list[str]:
    """One document per chapter or story: its heading, a blank line, its paragraphs."""
    text = text.replace("\r\n", "\n")
    body = re.split(r"^-{5,}$", text, maxsplit=1, flags=re.M)[-1]
    documents = []
    for section in re.split(r"^#+ *(?=\S)", body, flags=re.M):
        heading, _, rest = section.partition("\n")
        paragraphs = clean_prose(rest)
        if len(paragraphs) > 200:
            documents.append(f"{clean_prose(heading)}\n\n{paragraphs}\n".lstrip())
    return documents


def split_grimm(text: str) -> list[str]:
    """One document per story of the Grimms' file, where only capitals mark a title."""
    marked = re.sub(r"\n\n+([A-Z][A-Z ,'’-]+)\n\n", r"\n\n## \1\n\n", "\n\n" + text)
    return split_markdown_book(marked)


def read_books(path: Path, chosen: tuple[str, ...]) -> list[str]:
    documents = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for book in map(json.loads, lines):
            if book["path"].startswith(chosen):
                documents += split_markdown_book(book["text"])
    return documents


def read_gsm8k(path: Path) -> list[str]:
    """Word problems without the <<48/2=24>> calculator calls, which are not English."""
    documents = []
    # Not splitlines(): the questions hold other line separators of Unicode.
    for row in map(json.loads, path.read_text(encoding="utf-8").strip().split("\n")):
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        documents.append(f"Question: {row['question'].strip()}\nAnswer: {answer.strip()}\n")
    return documents


def read_python(root: Path, limit: int) -> list[str]:
    """Standard-library modules in an order fixed by their names, up to `limit` characters."""
    files = [p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts)]
    documents, total = [], 0
    for path in sorted(files, key=lambda p: zlib.crc32(p.relative_to(root).as_posix().encode())):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 500 < len(text) < 80_000 and total < limit:
            documents.append(text.expandtabs(8))
            total += len(text)
    return documents


def read_documents(data: Path) -> dict[str, list[str]]:
    """All documents by kind. Raises RunError if a file is missing."""
    books = data / "texts" / "classic_books.jsonl.gz"
    grimm = data / "texts" / "GrimmsFairyTales.txt"
    gsm8k = data / "prompts" / "gsm8k_train.jsonl"
    for path in (books, grimm, gsm8k):
        if not path.is_file():
            raise RunError(f"the training text {path} does not exist (see --data)")
    return {
        "tales": split_grimm(grimm.read_text(encoding="utf-8")) + read_books(books, TALES),
        "prose": read_books(books, PROSE),
        "gsm8k": read_gsm8k(gsm8k),
        "python": read_python(Path(sysconfig.get_path("stdlib")), PYTHON_CHARACTERS),
    }


def hold_out(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, validation): the validation documents are about 1 % of the text, by checksum."""
    ordered = sorted(documents, key=lambda text: zlib.crc32(text.encode()))
    wanted = VALIDATION_SHARE * sum(map(len, ordered))
    taken, count = 0, 0
    while taken < wanted and count < len(ordered) - 1:
        taken += len(ordered[count])
        count += 1
    return ordered[count:], ordered[:count]


def train_tokenizer(documents: dict[str, list[str]], vocabulary: int) -> Tokenizer:
    """Byte-level BPE, so any text round-trips. Each digit is a token, which helps arithmetic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t for kind in KINDS for t in documents[kind]), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents in one stream of ids, [N]. Each document ends with the end-of-text id 0."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        stream += encoding.ids
        stream.append(0)
    return np.asarray(stream, np.uint16)


def build_tokens(documents: dict[str, list[str]], vocabulary: int, cache: Path) -> None:
    """Writes tokenizer.json and tokens.npz (streams and validation bytes) into `cache`."""
    splits = {kind: hold_out(documents[kind]) for kind in KINDS}
    # Prose far exceeds the other text, so it is cut to its share in training.
    sample = {kind: train[:: 4 if kind == "prose" else 1] for kind, (train, _) in splits.items()}
    tokenizer = train_tokenizer(sample, vocabulary)
    arrays = {}
    for kind, (train, validation) in splits.items():
        arrays[f"train_{kind}"] = encode(tokenizer, train)
        arrays[f"validation_{kind}"] = encode(tokenizer, validation)
        arrays[f"bytes_{kind}"] = np.asarray(sum(len(t.encode()) for t in validation))
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(cache / "tokenizer.json"))
    unfinished = cache / "tokens.unfinished.npz"
    np.savez(unfinished, allow_pickle=False, **arrays)
    unfinished.rename(cache / "tokens.npz")
