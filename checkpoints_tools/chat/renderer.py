"""Renders chat templates in a process of their own, which has limits (`process`).

The process starts with the first template and serves all of them until this one ends: a start takes
a tenth of a second, a rendering a fraction of a millisecond.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_tools.chat.process import LENGTH_BYTES

SECONDS = 2.0  # of processor time for one rendering; a real template takes a few milliseconds
MEGABYTES = 256
MOST_CHARACTERS = 2**24
_PATIENCE = 60.0  # seconds for an answer on a machine that is busy with other things
_MOST_BYTES = 6 * MOST_CHARACTERS + 1024  # JSON writes a character in up to six
_SCRIPT = Path(__file__).with_name("process.py")


class Renderer:
    """One process that renders templates, started when it is needed.

    Threads may share it; they take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> tuple[str, str]:
        """Renders a template.

        Args:
          template: a Jinja template.
          variables: what it may use, as JSON can hold it.

        Returns:
          "text" and the text; "refused" and the message that the template raised; or "failed" and a
          reason.

        Raises:
          OSError: the process cannot be started.
        """
        request = json.dumps({"template": template, "variables": variables}).encode()
        with self._lock:
            channel = self._channel or self._start()
            whole = False
            try:
                answer = _exchange(channel, request)
                whole = True
                return answer
            except TimeoutError:
                return "failed", f"it does not end within {_PATIENCE:g} seconds"
            except (OSError, EOFError, ValueError, RecursionError):  # the process has ended
                return "failed", self._ending()
            finally:
                if not whole:  # the next template gets a new process
                    self.close()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        limits = (SECONDS, MEGABYTES << 20, MOST_CHARACTERS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT), *map(str, limits), *_jinja_folders()],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )  # fmt: skip
        self._channel = ours
        return ours

    def _ending(self) -> str:
        """Why the process ended."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "its process gave no valid answer"
        if status == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} seconds"
        return f"its process needs more than {MEGABYTES} MB, or breaks (status {status})"


RENDERER = Renderer()
atexit.register(RENDERER.close)

# The time zone, for templates that write the date, and the path of the interpreter's libraries.
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def _jinja_folders() -> list[str]:
    """The folders from which the process imports Jinja. It imports nothing else from them."""
    folders = []
    for package in ("jinja2", "markupsafe"):
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise OSError(f"{package} is not installed: pip install jinja2")
        folders.append(str(Path(found.origin).parent.parent))
    return sorted(set(folders))


def _exchange(channel: socket.socket, request: bytes) -> tuple[str, str]:
    """Sends a request and reads the answer. Raises OSError, EOFError or ValueError."""
    deadline = time.monotonic() + _PATIENCE
    channel.settimeout(_PATIENCE)
    channel.sendall(len(request).to_bytes(LENGTH_BYTES, "big") + request)
    length = int.from_bytes(_read(channel, LENGTH_BYTES, deadline), "big")
    if length > _MOST_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    kind, text = json.loads(_read(channel, length, deadline))
    return str(kind), str(text)


def _read(channel: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = channel.recv(min(count - len(data), 2**16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
