"""Checks for room on a disk before a write, and reports a full disk in one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNTOUCHED = "was not written and is as it was before"


@contextlib.contextmanager
def room_for(target: Path, nbytes: int = 0, *, left: str = _UNTOUCHED) -> Iterator[None]:
    """Raises one OSError with ENOSPC if the disk has no room for what the block writes.

    The check comes before the block, because threads that write report a full disk with pages on
    standard error.

    Args:
      target: the output, which the message names.
      nbytes: the most bytes that the block writes; 0 if that is not known.
      left: what becomes of `target` where the disk fills up in the block.
    """
    if _free(target) < nbytes:
        raise _disk_full(target, nbytes, _UNTOUCHED)
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise _disk_full(target, nbytes, left) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception reports a full disk, whatever its words."""
    return os.strerror(errno.ENOSPC) in str(error) or getattr(error, "errno", None) == errno.ENOSPC


def _free(target: Path) -> int:
    """Bytes that are free where `target` is or will be."""
    return shutil.disk_usage(next(each for each in target.resolve().parents if each.exists())).free


def _disk_full(target: Path, nbytes: int, left: str) -> OSError:
    free = _free(target)
    message = f"the disk is full: {target} {left}"
    if nbytes:
        message += f"; up to {nbytes / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free"
    if nbytes > free:
        message += f": {(nbytes - free) / 1e6:.1f} MB are missing"
    error = OSError(message)
    error.errno = errno.ENOSPC  # set here: the constructor would put it into the message
    return error
