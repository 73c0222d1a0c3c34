"""System calls of Linux that Python's library lacks; where one fails, it raises OSError."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

# The processors whose numbers of system calls this package knows; "" is any other system.
MACHINE = os.uname().machine if sys.platform == "linux" and struct.calcsize("P") == 8 else ""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
_CAPABILITY_VERSION = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}


def call(number: int, *arguments: Any) -> int:
    """A system call by its number; integers are passed as long ones."""
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(number), *values))


def library(name: str, *arguments: Any) -> int:
    """A function of the C library that returns -1 where it fails."""
    function = getattr(_LIBC, name, None)
    if function is None:
        raise OSError(f"this system has no {name}")
    values = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    return _checked(function(*values))


def prctl(option: int, value: int, more: Any = 0) -> None:
    library("prctl", option, value, more, 0, 0)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits if it died before."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() not in (0, parent):  # 0: the parent lives outside of the namespace
        os._exit(1)


def hide_memory() -> None:
    """Denies this process's memory and descriptors to other processes of the same user."""
    if sys.platform == "linux":
        prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Gives up the rights of the superuser and the ways to gain rights, for good."""
    if MACHINE in _CAPSET:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        none = (ctypes.c_uint32 * 6)()
        call(_CAPSET[MACHINE], header, none)
        prctl(PR_SET_NO_NEW_PRIVILEGES, 1)


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
