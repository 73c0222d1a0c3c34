"""A process that is told to end: whatever it has begun is undone, and it ends at once.

Python turns Ctrl-C into an exception. That is lost where it meets a finalizer or another library's
callback, it shows as a traceback while modules are imported, and the interpreter that it ends takes
the memory away from under the threads of a program that XLA still runs. A command therefore listens
in a thread of its own (`listen`). The thread undoes what is `unfinished` and ends the process
without unwinding.

Threads of other libraries write on meanwhile, and may make a directory again that was just removed.
So directories are removed last, by a program that takes the process's place and has no threads.

A library does not do this to its caller: without `listen`, exceptions unwind as always.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

Undo = Callable[[], str | None]

SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}
CLOSED_PIPE = 128 + signal.SIGPIPE  # the status of the shell's tools when nobody reads their output

# Removes the directories that it is given, and ends with the status that comes first.
_REMOVE = 'status=$1; shift; rm -rf -- "$@"; exit "$status"'

_unfinished: dict[object, Undo] = {}
_discarded: list[str] = []
_lock = threading.RLock()


@contextlib.contextmanager
def unfinished(undo: Undo) -> Iterator[None]:
    """Has `undo` called if the process is told to end within the block.

    Args:
      undo: removes the traces of the block, however far it has come. It may return a sentence about
        something that is kept on purpose.
    """
    key = object()
    _unfinished[key] = undo
    try:
        yield
    finally:
        del _unfinished[key]


def discard(directory: Path) -> None:
    """Has a directory removed at the end of the process, for an `undo` to call."""
    _discarded.append(str(directory))


def undisturbed() -> contextlib.AbstractContextManager[bool]:
    """A block in which no undoing begins. An ending that has begun never lets a block begin."""
    return _lock


def listen(program: str) -> None:
    """From now on the signals to end are obeyed in order, with status 128 + signal.

    A signal that the parent process has chosen to ignore, as nohup does, stays ignored.

    Args:
      program: the name that the one line on standard error begins with.
    """
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    obeyed = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in obeyed:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)

    def forget() -> None:
        """A forked child lacks that thread: it ends as it would have."""
        signal.set_wakeup_fd(-1)
        for number in obeyed:
            signal.signal(number, before[number])
        resume()

    def hold() -> None:
        """A signal to the child waits until the child has forgotten: the pipe is the parent's."""
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, obeyed))

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    masks: list[set[int | signal.Signals]] = []
    os.register_at_fork(before=hold, after_in_parent=resume, after_in_child=forget)
    threading.Thread(target=_wait, args=(heard, program), daemon=True).start()


@contextlib.contextmanager
def left_to_others() -> Iterator[None]:
    """A block in which the signals to end are somebody else's: nothing is undone for them."""
    bell = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)


def end(status: int) -> NoReturn:
    """Ends the process at once: nothing is flushed, undone or finalized."""
    with undisturbed():
        os._exit(status)


def _wait(heard: int, program: str) -> NoReturn:
    """Waits for a signal, undoes what is unfinished, says so in one line, and ends the process."""
    while (number := os.read(heard, 1)[0]) not in SIGNALS:
        pass
    with undisturbed():
        try:
            words = os.dup(2)
            _silence()  # the rest of the process may stumble over what is being undone
            kept = [
                sentence for undo in reversed(list(_unfinished.values())) if (sentence := undo())
            ]
            begin = "\n" if os.isatty(words) else ""
            line = "; ".join([SIGNALS[signal.Signals(number)], *kept])
            os.write(words, f"{begin}{program}: {line}\n".encode(errors="replace"))
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a second signal changes nothing
            if _discarded:
                os.execv("/bin/sh", ["sh", "-c", _REMOVE, "sh", str(128 + number), *_discarded])
        finally:
            os._exit(128 + number)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
