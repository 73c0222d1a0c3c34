"""Files that a command writes at its end: whole or not at all, and checked before it begins."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specjax.files.atomic_directory import beside
from specjax.files.disk_space import room_for


@contextlib.contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Yields a path to write to; its file becomes `target` if the block ends without an exception.

    Args:
      target: a file or a new path; its parents are made. A device or a pipe is yielded itself.
    """
    if _is_special(target):
        yield target
        return
    target = target.resolve()
    with room_for(target), beside(target) as directory:
        file = directory / target.name
        yield file
        if target.exists():
            shutil.copymode(target, file)
        file.replace(target)


def write_whole(target: Path, text: str) -> None:
    """Writes a file of UTF-8 text, whole or not at all."""
    with replacing_file(target) as file:
        file.write_text(text, encoding="utf-8")


def check_output(path: Path, *, directory: bool = False) -> None:
    """Checks that a file or a directory can be made at a path, or what is there replaced.

    Args:
      path: where the output will be. Parents that are missing will be made.
      directory: whether a directory may be there already.

    Raises:
      OSError: it cannot; the message says why.
    """
    try:
        if _is_special(path):
            with path.open("ab"):
                return
        target = path.resolve()
        if target.is_dir() and not directory:
            raise OSError(0, "it is a directory")
        with tempfile.TemporaryFile(dir=next(filter(os.path.lexists, target.parents))):
            return
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links go round in a circle"
        raise OSError(f"{path} cannot be written: {reason}") from None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
