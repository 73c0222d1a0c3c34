"""Folders of programs that run without a file system of their own, and those that a kill left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Collection, Iterator

_PREFIX = "specjax-sandbox-"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def folder(base: str, user: int) -> Iterator[str]:
    """A folder in `base` for this user; it is removed afterwards, with those of killed makers.

    It is locked as long as its maker lives: a folder that nobody has locked is an old one.
    """
    owners = {os.geteuid(), user}
    while True:
        path = os.path.join(base, _PREFIX + os.urandom(8).hex())
        os.mkdir(path, 0o700)
        lock = _locked(path, owners)
        if lock is not None:
            break  # else another process took it for an old one, and removes it
    if user != os.geteuid():
        os.chown(path, user, user)
    try:
        yield path
    finally:
        os.close(lock)
        sweep(base, owners)


def sweep(base: str, owners: Collection[int]) -> None:
    """Removes the folders in `base` that belong to these users and that nobody has locked."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if name.startswith(_PREFIX) and (lock := _locked(path, owners)) is not None:
            with contextlib.suppress(OSError):  # the next one to come tries again
                remove(path)
            os.close(lock)


def remove(path: str) -> None:
    """Removes a folder, whatever lies in it and however deep: one descriptor is open at a time."""
    os.chmod(path, stat.S_IRWXU)
    here = os.open(path, _OPEN_FOLDER)
    way: list[str] = []  # the folders from the top to here
    left = [_cleared(here)]  # the folders within each of them
    try:
        while way or left[-1]:
            if left[-1]:
                way.append(left[-1].pop())
                here = _moved(here, way[-1])
                left.append(_cleared(here))
            else:
                left.pop()
                here = _moved(here, "..")
                os.rmdir(way.pop(), dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(path)


def _cleared(folder: int) -> list[str]:
    """The folders within a folder, which become accessible; whatever else is there is removed."""
    folders = []
    for name in os.listdir(folder):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=folder)
            continue
        folders.append(name)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(name, stat.S_IRWXU, dir_fd=folder)
    return folders


def _moved(folder: int, name: str) -> int:
    """A descriptor of a folder next to another one, whose descriptor is closed."""
    descriptor = os.open(name, _OPEN_FOLDER, dir_fd=folder)
    os.close(folder)
    return descriptor


def _locked(path: str, owners: Collection[int]) -> int | None:
    """Locks a folder; None where it is gone, another user's, or in a living process's hands."""
    try:
        lock = os.open(path, _OPEN_FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(lock)
        if found.st_uid in owners and os.path.samestat(found, os.stat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
