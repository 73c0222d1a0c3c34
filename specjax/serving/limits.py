"""The limits of a connection: bytes of a body, time to send it, and the key that it must have."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from specjax.serving.errors import Refused

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY_SECONDS = 60.0
_FOR_ALL = ("/health", "/metrics")


class Limits:
    """Reads each request's whole body before the application sees it, or refuses it.

    app: the application.
    most_bytes: the most bytes of a body.
    key: what `Authorization: Bearer` must hold, but for /health and /metrics; None: nothing.
    """

    def __init__(self, app: App, most_bytes: int, key: str | None) -> None:
        self._app, self._most_bytes = app, most_bytes
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except Refused as error:
            headers = {**error.headers, "Connection": "close"}  # the rest of its body is not read
            answer = JSONResponse(error.body(), error.status, headers)
            await answer(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as routes see it
        if self._key is None or path in _FOR_ALL:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._key):
            message = "the request needs the header Authorization: Bearer with this server's key"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, message, code="invalid_api_key", headers=headers)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client has gone."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._most_bytes:
            raise self._too_large()
        deadline, body = time.monotonic() + _BODY_SECONDS, bytearray()
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                text = f"the body must come within {_BODY_SECONDS:g} seconds"
                raise Refused(408, text) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> Refused:
        message = f"the body has more than the {self._most_bytes} bytes that are accepted"
        return Refused(413, message, code="body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, then what else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
