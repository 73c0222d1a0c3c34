"""A filter of the system calls of judged programs.

A program may start threads but not processes. It cannot reach other processes, the network or parts
of the kernel that computing does not need. It can change files only by writing to them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .linux import MACHINE, PR_SET_SECCOMP, prctl

# From <linux/bpf_common.h>, <linux/seccomp.h> and <linux/audit.h>.
_LOAD, _IF_EQUAL, _IF_GREATER, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_MODE_FILTER = 2
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # places in what the filter looks at
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

# The numbers of system calls: on x86-64, and on Arm with 64 bits. -1: the processor lacks it.
_HIGHEST = 449  # futex_waitv, of Linux 5.16: libraries do without any newer one
_CLONE3 = 435
_FORBIDDEN = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # sockets, and what outlives a process; what others made is reached by numbers alone
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # the kernel
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "syslog": (103, 116), "open_by_handle_at": (304, 265),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    # who may do what with a file
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_CLONE, _CLONE_THREAD = (56, 220), 0x10000
_KILL, _TGKILL, _PRLIMIT64 = (62, 129), (234, 131), (302, 261)
_PRCTL, _PR_SET_PDEATHSIG = (157, 167), 1
_FCNTL, _SET_OWNER = (72, 25), (8, 15)  # the process that gets signals of a descriptor
_IOCTL, _SET_OWNER_OR_TYPE = (16, 29), (0x8901, 0x8902, 0x5412)
_SOCKETPAIR, _NOT_A_STREAM = (53, 199), 0xE  # a pair of another type can send to any socket

_Instruction = tuple[int, int, int, int]  # operation, to skip if true, to skip if false, operand
_REFUSE: _Instruction = (_RETURN, 0, 0, _FAIL | errno.EPERM)
_DENY_KNOWING: _Instruction = (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
_PASS: _Instruction = (_RETURN, 0, 0, _ALLOW)


def is_known() -> bool:
    """Whether this system filters system calls, on a processor whose numbers are known."""
    try:
        prctl(PR_SET_SECCOMP, _MODE_FILTER)  # without a filter, which is another error
    except OSError as error:
        return error.errno == errno.EFAULT and MACHINE in _ARCHITECTURES
    return False


def forbid() -> None:
    """Installs the filter for this process and its threads, for good.

    Raises OSError where the process may still gain rights: `linux.drop_capabilities` comes before.
    """
    filter_ = _filter(os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filter_))
    program = ctypes.create_string_buffer(struct.pack("HP", len(filter_), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, program)


def _filter(process: int) -> list[_Instruction]:
    column = _COLUMN[MACHINE]
    forbidden = sorted({numbers[column] for numbers in _FORBIDDEN.values()} - {-1})
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[MACHINE]),  # else the numbers are another table's
        _REFUSE,
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER, 0, 1, _HIGHEST),  # x86-64's second table too, from 2 ** 30 on
        _DENY_KNOWING,
        (_IF_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory; libraries fall back to clone
        _DENY_KNOWING,
        *(each for number in forbidden for each in ((_IF_EQUAL, 0, 1, number), _REFUSE)),
        *_where(_CLONE[column], 0, _IF_ANY_BIT, (_CLONE_THREAD,), _PASS, _REFUSE),
        *_where(_KILL[column], 0, _IF_EQUAL, (process,), _PASS, _REFUSE),
        *_where(_TGKILL[column], 0, _IF_EQUAL, (process,), _PASS, _REFUSE),
        *_where(_PRLIMIT64[column], 0, _IF_EQUAL, (0, process), _PASS, _REFUSE),
        *_where(_PRCTL[column], 0, _IF_EQUAL, (_PR_SET_PDEATHSIG,), _REFUSE, _PASS),
        *_where(_FCNTL[column], 1, _IF_EQUAL, _SET_OWNER, _REFUSE, _PASS),
        *_where(_IOCTL[column], 1, _IF_EQUAL, _SET_OWNER_OR_TYPE, _REFUSE, _PASS),
        *_where(_SOCKETPAIR[column], 1, _IF_ANY_BIT, (_NOT_A_STREAM,), _REFUSE, _PASS),
        _PASS,
    ]


def _where(
    number: int,
    argument: int,
    test: int,
    operands: tuple[int, ...],
    then: _Instruction,
    otherwise: _Instruction,
) -> list[_Instruction]:
    """Instructions that decide on one system call by an argument's lower half."""
    tests = [each for operand in operands for each in ((test, 0, 1, operand), then)]
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, otherwise]
    return [(_IF_EQUAL, 0, len(body), number), *body]
