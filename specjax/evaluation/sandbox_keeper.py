"""The sandbox's process: it isolates and limits itself, then runs the program.

This is a script that imports the standard library alone. Its arguments are the folder, seconds and
megabytes. It reads the program from standard input. It writes to standard output one line,
"isolated" or "limited", and then how the program ended: "" or the exception, in JSON.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

# From <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/bpf_common.h>, <linux/seccomp.h> and the
# tables of system calls.
NAMESPACES = (
    0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000
)  # user net pid ipc mount
MS_RECURSIVE, MS_PRIVATE = 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVILEGES = 1, 22, 38
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
SYS_CLONE3, CLONE_THREAD = 435, 0x10000
CLONE = {"x86_64": 56, "aarch64": 220}
FORKS = {"x86_64": (57, 58), "aarch64": ()}

NOBODY = 65534
PROCESSES = 16  # threads included, where the system counts them per user

PROGRAM = """
import json, os, sys
source, word = sys.stdin.read(), os.dup(1)
os.dup2(2, 1)
try:
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
    reason = ""
except BaseException as error:
    reason = f"{type(error).__name__}: {error}"[:300]
os.write(word, json.dumps(reason).encode())
os._exit(0)
"""


def main() -> None:
    folder, seconds, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    isolated = _isolate(libc, folder, megabytes)
    os.write(1, b"isolated\n" if isolated else b"limited\n")
    if isolated:
        _continue_in_child(libc)  # as first process of the namespace: the others end with it
        _continue_in_child(libc)
    _limit(seconds, megabytes)
    _forbid_processes(libc)
    os.chdir(folder)
    os.execv(sys.executable, [sys.executable, "-I", "-B", "-c", PROGRAM])


def _isolate(libc: ctypes.CDLL, folder: str, megabytes: int) -> bool:
    """Enters namespaces without a network, where the folder alone can be written to."""
    user, group = os.geteuid(), os.getegid()
    try:
        if libc.unshare(NAMESPACES) != 0:
            return False
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except (AttributeError, OSError):
        return False  # not Linux, or namespaces are not allowed
    size = f"size={megabytes // 16}m".encode()
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    return bool(
        libc.mount(b"none", b"/", None, MS_RECURSIVE | MS_PRIVATE, None) == 0
        and libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, 32) == 0
        and libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, size) == 0
    )


def _continue_in_child(libc: ctypes.CDLL) -> None:
    """Forks. Returns in the child, which dies with its parent; the parent waits and exits."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(seconds: int, megabytes: int) -> None:
    limits = {
        "RLIMIT_CPU": seconds, "RLIMIT_AS": megabytes << 20, "RLIMIT_FSIZE": megabytes << 16,
        "RLIMIT_NPROC": PROCESSES, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0,
    }  # fmt: skip
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (AttributeError, OSError, ValueError):
            continue  # macOS lacks some of them


def _forbid_processes(libc: ctypes.CDLL) -> None:
    """Installs a filter of system calls: this process may start threads, but no process."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in CLONE:
        return
    forks, clone = FORKS[machine], CLONE[machine]
    count = len(forks)
    filter_ = [  # operation, instructions to skip if true and if false, operand
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_IF_EQUAL, 5 + count, 0, SYS_CLONE3),
        *((JUMP_IF_EQUAL, 3 + count - i, 0, number) for i, number in enumerate(forks)),
        (JUMP_IF_EQUAL, 0, 2, clone),
        (LOAD, 0, 0, 16),  # its first argument, the flags
        (JUMP_IF_ANY_BIT, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL | errno.EPERM),
        (RETURN, 0, 0, FAIL | errno.ENOSYS),  # makes libraries fall back to clone
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filter_))
    program = ctypes.create_string_buffer(struct.pack("HP", len(filter_), ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    libc.prctl(PR_SET_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero)
    libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, zero, zero)


if __name__ == "__main__":
    main()
