"""Locks of files and directories, which the system drops when their process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def try_lock(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Locks what is at a path.

    It opens the path again if another file or directory is there by the time that it has the lock.

    Args:
      path: a file or a directory.
      flags: as `os.open` takes them.

    Returns:
      A descriptor that holds the lock; None if another process holds it.

    Raises:
      FileNotFoundError: nothing is there, and `flags` do not make it.
      OSError: it cannot be opened, or the file system has no locks.
    """
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, flags, 0o666)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if _is_at(path, descriptor):
                stack.pop_all()
                return descriptor


def abandoned(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields those of some paths that no process holds, each locked until the next one.

    On a file system without locks each may be in use, so none is yielded.
    """
    for path in paths:
        try:
            lock = try_lock(path)
        except OSError:  # another process removed it, or the file system does not lock
            continue
        if lock is not None:
            try:
                yield path
            finally:
                os.close(lock)


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """A block that one process at a time is in, of all that name the directory; the others wait.

    On a file system without locks nobody waits.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
