"""Landlock, for systems without namespaces: a process can open only a few files.

Linux has what this needs since 6.2. Landlock does not stop a process from changing the mode, the
owner or the times of other files; the filter of system calls does.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence

from .linux import MACHINE, call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_OLDEST = 3  # the first version with truncation
_SCOPES = 6  # the first version with signals and abstract sockets
# Access rights to files, from <linux/landlock.h>.
_WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE
_ALL = (1 << 15) - 1
_CREATE_NODES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # devices, sockets and pipes with names


def is_known() -> bool:
    """Whether this system has Landlock in a sufficient version."""
    try:
        return bool(MACHINE) and call(_CREATE_RULESET, None, 0, _ASK_VERSION) >= _OLDEST
    except OSError:
        return False


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Denies this process, for good, every file that is not among or below these.

    Args:
      readable: files and folders to read; those that do not exist are left out.
      writable: files and folders to read and write, where files may be made and removed.

    Raises:
      OSError: the system does not allow it, or the process may still gain rights:
        `linux.drop_capabilities` comes before.
    """
    version = call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    network, scopes = 3, 3  # binding and connecting; abstract sockets and signals
    handled = (ctypes.c_uint64 * 3)(_ALL, network, scopes)
    size = 24 if version >= _SCOPES else 8
    rules = call(_CREATE_RULESET, handled, size, 0)
    for paths, rights in (
        (readable, _READ_FILE | _READ_FOLDER),
        (writable, _ALL & ~_CREATE_NODES),
    ):
        for path in filter(os.path.exists, paths):
            _allow(rules, path, rights)
    call(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _OF_FILES
    rule = ctypes.create_string_buffer(
        rights.to_bytes(8, "little") + descriptor.to_bytes(4, "little"), 12
    )
    call(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
    os.close(descriptor)
