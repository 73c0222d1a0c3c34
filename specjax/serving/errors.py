"""Refusals, as the engine raises them and as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refused(Exception):  # noqa: N818 - a client is told so; nothing has gone wrong here
    """A request that is not answered: its status, one sentence, and OpenAI's words for it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status, self.message, self.param, self.code)


class Busy(Refused):
    """Too many outputs wait."""

    def __init__(self, most: int) -> None:
        message = f"{most} outputs may wait for a row, and that many do: ask again in a second"
        super().__init__(429, message, code="queue_full", headers={"Retry-After": "1"})


class Ending(Refused):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__(
            503, "the server ends and takes no new requests", code="ending",
            headers={"Retry-After": "10"},
        )  # fmt: skip


class HostGoneError(OSError):
    """Another host of the mesh cannot be reached: nothing can be decoded any more."""


_TYPES = {
    401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "server_error",
}  # fmt: skip


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error object of OpenAI's."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
