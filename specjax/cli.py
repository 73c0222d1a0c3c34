"""The command line's door: arguments in, an exit status out.

0              done
1              refused, after one sentence on standard error
2              the arguments cannot be read
130, 143, 129  ended by Ctrl-C, by SIGTERM, or with the terminal
141            nobody reads the output any more, as in `specjax … | head -1`
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from specjax.checks import printable
from specjax.files import interruption


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    from specjax.commands.parser import run_command  # here: its imports take longer than Ctrl-C may

    try:
        try:
            run_command(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        return interruption.CLOSED_PIPE
    except (ValueError, OSError) as error:
        return _refuse(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):  # of XLA
            raise
        reason = str(error).partition("\n")[0]
        return _refuse(f"memory has run out: {reason}")
    return 0


def _refuse(reason: object) -> int:
    print(f"specjax: {printable(reason, 2000)}", file=sys.stderr)
    return 1


def _one_line(message: Warning | str, *where: object, **line: object) -> str:
    """A warning as a command shows it, without the place in the code; "" if it was mended."""
    from specjax.files.user_cache import removes_broken  # here: it imports JAX

    if removes_broken(str(message)):
        return ""
    return f"specjax: {printable(message, 2000)}\n"


def _show_log() -> None:
    """From now on what the library logs, such as what it makes the user wait for, is shown."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("specjax: %(message)s"))
    log = logging.getLogger("specjax")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # a library may have given the root a handler of its own


def run() -> NoReturn:
    """Runs the command of this process, and ends it."""
    interruption.listen("specjax")
    warnings.formatwarning = _one_line
    _show_log()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what it cannot show, it still prints
    interruption.end(main())


if __name__ == "__main__":
    run()
