"""Replaces a directory as a whole: readers see the old one or the new one, never a part.

The new directory is written beside its target, on the same file system. On Linux it takes the
target's place by one exchange of names, elsewhere by two renames. A process killed between the two
renames leaves the old directory under a backup name, and `recover` restores it.

Each directory in the making is locked, and the system drops the lock when the process ends. So the
next process can remove what killed processes left, without touching a directory that is still being
written.

A loss of power may damage the result: files are not synchronized to disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from specjax.files import interruption
from specjax.files.disk_space import room_for
from specjax.files.locks import abandoned, try_lock

TargetCheck = Callable[[Path], None]

AT_FDCWD = -100
RENAME_EXCHANGE = 2
_TRIES = 100  # to remove a directory


@contextlib.contextmanager
def replacing(target: Path, check: TargetCheck, nbytes: int = 0) -> Iterator[Path]:
    """Yields an empty directory that becomes `target` when the block ends without an exception.

    Args:
      target: a directory or a new path; its parents are made.
      check: raises ValueError if a path holds what must not be replaced. It is asked before the
        block and again after it, because others may have used the path meanwhile.
      nbytes: the most bytes that the block writes; 0 if that is not known.

    Yields:
      The directory to write to. It is removed if the block raises, and `target` stays as it was.

    Raises:
      ValueError: `target` holds what must not be replaced; it stays as it is.
      OSError: the directory cannot be made or cannot take the target's place, or the disk is full.
    """
    target = target.resolve()
    recover(target)
    check(target)
    with room_for(target, nbytes), beside(target) as temporary:
        yield temporary
        with interruption.undisturbed():
            check(target)
            _take_place(temporary, target)


def check_new(target: Path) -> None:
    """Raises ValueError unless nothing or an empty directory is at a path."""
    if not is_free(target):
        raise ValueError(f"{target} exists; give a new path")


def check_replaceable(target: Path, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Raises ValueError if a path holds anything that a directory of a kind must not replace.

    Args:
      target: where the directory will be.
      kind: what it is, with an article.
      is_kind: whether a path holds such a directory.
    """
    if not is_free(target) and not is_kind(target):
        raise ValueError(f"{target} exists and is not {kind}; give a new path or {kind} to replace")


def is_free(target: Path) -> bool:
    """Whether nothing or an empty directory is at a path."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yields an empty hidden directory on the file system of `target`; it is removed at last.

    The target's parents are made, and what killed processes left beside it is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    with contextlib.ExitStack() as stack:
        with interruption.undisturbed():
            temporary, lock = _make_temporary(target)
            stack.enter_context(interruption.unfinished(partial(interruption.discard, temporary)))
        try:
            yield temporary
        finally:
            remove(temporary)  # after an exchange this is the old one
            if lock is not None:
                os.close(lock)


def remove(directory: Path) -> None:
    """Removes a directory that another thread may still be writing to."""
    for _ in range(_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.01)


def recover(target: Path) -> None:
    """Restores the old directory if a process was killed between the two renames.

    Readers may call this too: it removes nothing, and moves nothing while `target` exists.
    """
    target = target.resolve()
    if not target.exists() and _backup(target).is_dir():
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            _backup(target).rename(target)


def _backup(target: Path) -> Path:
    return target.parent / f".{target.name}.specjax-backup"


def _remove_abandoned(target: Path) -> None:
    """Removes what killed processes left: a backup of the target, directories in the making."""
    if target.exists():
        shutil.rmtree(_backup(target), ignore_errors=True)
    for path in abandoned(target.parent.glob(f".{glob.escape(target.name)}.tmp-*")):
        shutil.rmtree(path, ignore_errors=True)


def _make_temporary(target: Path) -> tuple[Path, int | None]:
    """A new directory and the descriptor that locks it, None if there are no locks."""
    while True:
        path = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex[:12]}"
        path.mkdir()
        try:
            lock = try_lock(path)
        except FileNotFoundError:
            lock = None
        except OSError:
            return path, None
        if lock is not None:
            return path, lock
        # Another process mistook it for an abandoned one before it was locked, and removes it.


def _take_place(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        backup = _backup(target)
        target.rename(backup)
        new.rename(target)
        shutil.rmtree(backup, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    status: int = renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE)
    return status == 0
