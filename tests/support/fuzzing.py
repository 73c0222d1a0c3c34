"""Runs readers on damaged and hostile files. They may only raise ValueError and OSError."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

# A function that reads a case, and the strategy of its cases.
Reader = tuple[Callable[[Any], object], st.SearchStrategy[Any]]
CASES = int(os.environ.get("SPECJAX_FUZZ_CASES", "0"))  # per reader; 0: as many as time allows
_BATCH = 100
_LONGEST = 20  # seconds per case, on a busy machine


def reads(file: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Writes a case to the file, then reads it."""

    def write_and_read(data: bytes) -> object:
        file.write_bytes(data)
        return read()

    return write_and_read


class HangError(BaseException):
    """A case takes too long. It derives from BaseException, so readers do not catch it."""


def fuzz_a_little(read: Callable[[Any], object], cases: st.SearchStrategy[Any], count: int) -> None:
    """Runs the same cases every time."""
    _fuzz(read, cases, count, derandomize=True)


def fuzz(read: Callable[[Any], object], cases: st.SearchStrategy[Any], seconds: float) -> int:
    """Runs new cases every time: CASES of them, or as many as `seconds` allow.

    Returns:
        The number of cases.
    """
    begun, count = time.monotonic(), 0
    while count < CASES or (not CASES and time.monotonic() - begun < seconds):
        size = min(_BATCH, CASES - count) if CASES else _BATCH
        _fuzz(read, cases, size, derandomize=False)
        count += size
    return count


def _fuzz(
    read: Callable[[Any], object], cases: st.SearchStrategy[Any], count: int, derandomize: bool
) -> None:
    @hypothesis.settings(
        max_examples=count, derandomize=derandomize, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(cases)
    def check(case: Any) -> None:
        _check(read, case)

    check()


def _check(read: Callable[[Any], object], case: Any) -> None:
    previous = signal.signal(signal.SIGALRM, _raise_hang)
    signal.alarm(_LONGEST)
    try:
        read(case)
    except (ValueError, OSError) as error:
        message = str(error)
        assert message.isprintable(), f"a character of control in {message!r}"
        assert len(message) < 2000, f"a message of {len(message)} characters: {message[:200]!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _raise_hang(*_: object) -> None:
    raise HangError(f"a case takes more than {_LONGEST} seconds")
