"""Replace a directory as a whole: whoever looks sees the old one or the new one, never a part.

The new directory is written beside its target, so on the same file system, and takes the target's
place by one exchange of names where the system has that (Linux), else by two renames; a process
killed between the two leaves the old directory under a backup name, which `recover` brings back.
A lock on the directory in the making, which the system drops with its process, tells the leavings
of killed processes, which the next one removes, from directories that are still being written.

Left out on purpose: surviving a loss of power, which would need every file synchronized to disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

AT_FDCWD = -100
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `target` when the block ends without an exception.

    Args:
      target: a directory, or a path where nothing is; its parents are made.

    Yields:
      The directory to write to. It is removed if the block raises, and `target` stays as it was.

    Raises:
      OSError: the directory cannot be made or cannot take the target's place.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    _remove_abandoned(target)
    temporary, lock = _make_temporary(target)
    try:
        yield temporary
        _take_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange this is the old one
        if lock is not None:
            os.close(lock)


def recover(target: Path) -> None:
    """Brings the old directory back if a process was killed between the two renames.

    Safe where one only reads: nothing is ever removed, and nothing moved while `target` exists.
    """
    target = target.resolve()
    if not target.exists() and _backup(target).is_dir():
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            _backup(target).rename(target)


def _backup(target: Path) -> Path:
    return target.parent / f".{target.name}.specjax-backup"


def _remove_abandoned(target: Path) -> None:
    """Removes what killed processes left: a backup beside the target, directories in the making."""
    if target.exists():
        shutil.rmtree(_backup(target), ignore_errors=True)
    for path in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        with contextlib.suppress(OSError):  # without locks nobody can tell whether it is abandoned
            lock = _try_lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _make_temporary(target: Path) -> tuple[Path, int | None]:
    """A new directory and the descriptor that locks it, None where there are no locks."""
    while True:
        path = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex[:12]}"
        path.mkdir()
        try:
            lock = _try_lock(path)
        except OSError:
            return path, None
        if lock is not None:
            return path, lock
        # else another process took it for abandoned before it was locked, and removes it


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None if another has it or has removed the directory.

    Raises:
      OSError: it cannot be locked at all, as on file systems without locks.
    """
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            stack.pop_all()
            return descriptor
    return None


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
