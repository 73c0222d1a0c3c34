"""Limits of a process's resources, and the user that it runs as."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from .linux import drop_capabilities

_NOBODY = 65534
_THREADS = 16  # counted with all processes of the user, where there are no namespaces
_OPEN_FILES = 64
FILES_SHARE = 16  # one file, and where there are namespaces all of them, hold this part of memory


def limit(seconds: int, megabytes: int) -> None:
    """Limits processor time, memory, the size of files, and the numbers of files and threads."""
    limits = {
        "RLIMIT_CPU": seconds,
        "RLIMIT_AS": megabytes << 20,
        "RLIMIT_FSIZE": (megabytes << 20) // FILES_SHARE,
        "RLIMIT_NPROC": _THREADS,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, OSError, ValueError):
            continue  # macOS lacks some of them


def least_user(libraries: Sequence[str]) -> int:
    """The user that programs run as: "nobody" if this process is the superuser's.

    If "nobody" cannot read the libraries, it is the superuser, without special rights.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    needed = [os.__file__, *filter(os.path.exists, libraries)]
    child = os.fork()  # a process that becomes "nobody" cannot go back
    if child:
        return 0 if os.waitpid(child, 0)[1] else _NOBODY
    try:
        become(_NOBODY)
        os._exit(not all(os.access(path, os.R_OK) for path in needed))
    finally:
        os._exit(1)


def become(user: int) -> None:
    """Goes on as this user, without the rights of the superuser, for good."""
    if os.geteuid() != user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    drop_capabilities()
