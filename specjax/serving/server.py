"""A server's life: it compiles, listens, and ends in order when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from specjax.files import interruption
from specjax.serving.engine import Engine

_LOOK = 0.05  # seconds between two looks at what still runs
_LAST_WRITES = 5  # seconds for clients to read what is finished


class Server(uvicorn.Server):
    """uvicorn's server with an engine behind it.

    SIGTERM and Ctrl-C let what runs finish for `grace` seconds, while new requests get a 503; what
    is left then ends with an error. A second signal ends it at once.

    engine: has been started.
    grace: seconds.
    ready: is called once the server listens.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, grace: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine, self._grace, self._ready = engine, grace, ready
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[Any] | None = None) -> None:
        """Serves until it is told to end."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)
        await asyncio.to_thread(self._engine.stop)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listens, and says so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hears the signals to end, where this is the main thread, without ending the process."""
        try:
            before = {
                number: signal.signal(number, self.handle_exit)
                for number in _SIGNALS
                if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
            }
        except ValueError:  # another thread
            before = {}
        # A signal that comes between the two ends the process as it ends any other command.
        try:
            with interruption.left_to_others() if before else contextlib.nullcontext():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Obeys a signal."""
        self.end_soon()

    def end_soon(self) -> None:
        """Begins to end; ends at once if it has begun already. Any thread may call it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end)

    async def on_tick(self, counter: int) -> bool:
        """Ends where the engine has ended by itself."""
        if self._engine.gone is not None and self._ending is None:
            self._end()
        return await super().on_tick(counter)

    def _end(self) -> None:
        if self._ending is None:
            self._engine.drain()
            self._ending = asyncio.ensure_future(self._finish())
        else:
            self.should_exit = self.force_exit = True

    async def _finish(self) -> None:
        """Waits until nothing runs, or too long; what is left is told so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                while self._engine.open:
                    await asyncio.sleep(_LOOK)
        await asyncio.to_thread(self._engine.stop)
        self.should_exit = True


_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def make_server(app: Any, engine: Engine, grace: float, ready: Callable[[], None]) -> Server:
    """Returns a server of an application. Its `run` takes the sockets to listen on."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=_LAST_WRITES,
    )  # fmt: skip
    return Server(config, engine, grace, ready)
