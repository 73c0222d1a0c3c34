"""Makes a datastore of a corpus: the texts with the lowest perplexity under the target.

This is SPECTRA-RETRIEVAL's refinement (section 3.2). Scores are written to disk as they come, and a
killed run continues where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from specjax.drafting.datastore import Datastore, check_target
from specjax.evaluation.digests import digest
from specjax.evaluation.scoring import score_tokens
from specjax.files import interruption
from specjax.files.disk_space import room_for
from specjax.files.json_lines import is_json_lines, read_lines, read_text
from specjax.files.locks import abandoned, try_lock
from specjax.generation.text import TokenCodec
from specjax.model.parallel import whole_rows
from specjax.model.params import Params

TEXT_FIELDS = ("text", "content", "prompt", "question", "problem")  # of a JSON line
_WIDTH = 32  # sequences are padded to multiples of this
_SHORTEST = 4  # shorter texts are dropped: they hold next to nothing to look up


def build_datastore(
    params: Params,
    tokenizer: TokenCodec,
    corpus: str | Path,
    out: str | Path,
    *,
    keep: int | None = 100_000,
    refine: bool = True,
    length: int = 256,
    rows: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Datastore:
    """Reads a corpus, scores it, keeps the best of it and writes the datastore to `out`.

    Args:
      params: the target.
      tokenizer: the target's tokenizer.
      corpus: a text file, each paragraph a text, or JSON lines with one of TEXT_FIELDS; either may
        be gzipped.
      out: a directory; it is written whole or not at all.
      keep: sequences to keep; None: all.
      refine: keep the sequences of the lowest perplexity; False: the first ones, for comparison.
      length: tokens per sequence; longer texts are cut into several.
      rows: sequences per pass.
      progress: called with the sequences scored and the sequences in all.

    Returns:
      The datastore.

    Raises:
      ValueError: the corpus is empty or is not text, `out` exists and is not a datastore, or an
        argument is out of its range; or another process is making `out`.
    """
    for name, value in (("keep", 1 if keep is None else keep), ("rows", rows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not _SHORTEST <= length <= params.config.max_position_embeddings:
        raise ValueError(
            f"length must be between {_SHORTEST} and the model's "
            f"{params.config.max_position_embeddings} positions, got {length}"
        )
    check_target(Path(out))
    sequences = tokenize(tokenizer, Path(corpus), length)
    path = Path(out).resolve()
    with contextlib.ExitStack() as stack:
        if refine and keep is not None and keep < len(sequences):
            scores = path.parent / f".{path.name}.scores-{digest(params, sequences)}"
            stack.enter_context(_held(scores, path))
            nats = score_sequences(params, sequences, scores, rows, progress)
            best = np.sort(np.argsort(nats, kind="stable")[:keep])
            sequences = [sequences[index] for index in best]
        store = Datastore.create(sequences[:keep], params.config.vocab_size)
        store.save(path)
    _remove_scores(path)
    return store


@contextlib.contextmanager
def _held(scores: Path, out: Path) -> Iterator[None]:
    """Keeps other processes from a file of scores, which is made if it is missing.

    Raises ValueError if another process holds it.
    """
    scores.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with interruption.undisturbed():
            lock = try_lock(scores, os.O_RDWR | os.O_CREAT)
            if lock is None:
                raise ValueError(f"another process is making {out} already")
            stack.callback(os.close, lock)
            stack.enter_context(interruption.unfinished(partial(_kept, scores)))
        yield


def _remove_scores(out: Path) -> None:
    """Removes the scores of every build of a datastore, unless a process is at work on them."""
    pattern = re.compile(re.escape(f".{out.name}.scores-") + "[0-9a-f]{12}")
    found = (path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    for path in abandoned(found):
        path.unlink()


def _kept(scores: Path) -> str | None:
    """Says what a build that is told to end leaves behind: nothing before the first score."""
    known = np.isfinite(np.fromfile(scores, np.float32)).sum() if scores.exists() else 0
    if not known:
        scores.unlink(missing_ok=True)
        return None
    return f"{known} scores are kept in {scores}, and the same command goes on from there"


def score_sequences(
    params: Params,
    sequences: Sequence[np.ndarray],
    path: Path,
    rows: int,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Mean negative log-likelihood of every sequence, in nats per token: f32[n].

    `path` is the file of the scores so far, with NaN for the missing ones.
    """
    none = np.full(len(sequences), np.nan, np.float32)
    if not path.exists() or path.stat().st_size < none.nbytes:  # zeros would be the best scores
        with room_for(path, none.nbytes):
            none.tofile(path)
    scores = np.memmap(path, np.float32, "r+", shape=(len(sequences),))
    lengths = np.array([len(sequence) for sequence in sequences])
    order = np.argsort(lengths, kind="stable")  # similar lengths together: less padding
    missing = order[np.isnan(scores[order])]
    rows = min(rows, whole_rows(params.mesh, max(len(missing), 1)))
    for first in range(0, len(missing), rows):
        chosen = missing[first : first + rows]
        width = -(-int(lengths[chosen].max()) // _WIDTH) * _WIDTH
        batch = np.zeros((rows, min(width, params.config.max_position_embeddings)), np.int32)
        for row, index in enumerate(chosen):
            batch[row, : lengths[index]] = sequences[index]
        log_probs = np.asarray(score_tokens(params, batch)[0], np.float64)[: len(chosen)]
        counted = np.arange(1, batch.shape[1]) < lengths[chosen, None]
        scores[chosen] = -(log_probs * counted).sum(1) / counted.sum(1)
        scores.flush()
        if progress is not None:
            progress(len(sequences) - len(missing) + first + len(chosen), len(sequences))
    return np.array(scores)


def tokenize(tokenizer: TokenCodec, corpus: Path, length: int) -> list[np.ndarray]:
    """Tokenizes every text of the corpus and cuts it into pieces of at most `length` tokens."""
    sequences = []
    for text in _texts(corpus):
        tokens = np.asarray(tokenizer.encode(text), np.int32)
        pieces = (tokens[start : start + length] for start in range(0, len(tokens), length))
        sequences += [piece for piece in pieces if len(piece) >= _SHORTEST]
    if not sequences:
        raise ValueError(f"{corpus} holds no text of at least {_SHORTEST} tokens")
    return sequences


def _texts(corpus: Path) -> Iterator[str]:
    if is_json_lines(corpus):
        yield from (line.text(*TEXT_FIELDS) for line in read_lines(corpus))
    else:
        yield from (part for part in read_text(corpus).split("\n\n") if part.strip())
