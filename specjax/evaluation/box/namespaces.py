"""Namespaces without a network, whose file system holds Python's library and one small folder."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from .linux import MACHINE, call, library

# From <sched.h> and <sys/mount.h>.
_NEW_USER, _NEW_PROCESSES = 0x10000000, 0x20000000
_NEW_REST = 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000  # network, IPC, host name, mounts
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2
_READ_ONLY, _NO_SET_UID, _NO_DEVICES = 1, 2, 4
_MOUNT_SETATTR, _HERE, _ALL_BELOW = 442, -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_NOBODY = 65534
_FILES = 4096  # most files and folders that a program may make
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER = "/tmp"


def enter(base: str, libraries: Sequence[str], megabytes: int) -> None:
    """Moves this process into new namespaces.

    Afterwards its file system holds `libraries` and `DEVICES` at their places, read-only, and
    `FOLDER`, which is empty and goes away with the last process.

    Args:
      base: a folder on which the new file system is built.
      libraries: files and folders; those that do not exist are left out.
      megabytes: what `FOLDER` may hold.

    Raises:
      OSError: the system does not allow it. This process may then be in some of the namespaces.
    """
    if MACHINE not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _unshare()
    library("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    found = [path for path in (*libraries, *DEVICES) if os.path.exists(path)]
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in found]
    os.umask(0o022)
    _mount_memory(base, "size=1m,mode=755")
    os.chdir(base)
    for path, descriptor in sources:
        _bind(descriptor, f".{path}", devices=path in DEVICES)
        os.close(descriptor)
    os.makedirs(f".{FOLDER}", exist_ok=True)
    _mount_memory(f".{FOLDER}", f"size={megabytes}m,nr_inodes={_FILES},mode=777")
    _set_attributes(".", _READ_ONLY, 0)
    call(_PIVOT_ROOT[MACHINE], b".", b".")  # the old root lies on top, until
    library("umount2", b".", _DETACH)
    os.chdir("/")
    os.stat(os.__file__)  # a library that cannot be read is not here


def number_children_anew() -> None:
    """Makes the next child the first process of a namespace: it sees no other one."""
    library("unshare", _NEW_PROCESSES)


def _unshare() -> None:
    """Leaves the old namespaces; a user without the right to do so needs one of users."""
    user, group = os.geteuid(), os.getegid()
    try:
        library("unshare", _NEW_REST)
    except PermissionError:
        library("unshare", _NEW_USER | _NEW_REST)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_NOBODY} {user} 1"),
            ("gid_map", f"{_NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _bind(descriptor: int, target: str, *, devices: bool) -> None:
    """Shows an open file or folder at `target`, with all below it, read-only."""
    if os.path.lexists(target):
        return  # a folder around it is there already
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    source = f"/proc/self/fd/{descriptor}".encode()
    library("mount", source, target.encode(), None, _BIND | _RECURSIVE, None)
    forbidden = _READ_ONLY | _NO_SET_UID | (0 if devices else _NO_DEVICES)
    _set_attributes(target, forbidden, _ALL_BELOW)


def _mount_memory(target: str, options: str) -> None:
    flags = _NO_SET_UID | _NO_DEVICES
    library("mount", b"none", target.encode(), b"tmpfs", flags, options.encode())


def _set_attributes(target: str, attributes: int, flags: int) -> None:
    changes = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    call(_MOUNT_SETATTR, _HERE, target.encode(), flags, changes, ctypes.sizeof(changes))
