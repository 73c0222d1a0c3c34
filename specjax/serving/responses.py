"""The parts that both kinds of response have: heads, counts of tokens, and server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from specjax.serving.errors import Refused
from specjax.serving.outputs import Gain, Outputs

END = b"data: [DONE]\n\n"


class Writer(Protocol):
    """Writes the gains of one request's outputs as OpenAI's objects."""

    def chunks(self, gain: Gain) -> list[dict[str, Any]]:
        """The choices of a stream that a gain makes; none where it shows nothing."""

    def choice(self, index: int, gains: list[Gain]) -> dict[str, Any]:
        """A whole output as one choice."""


class Head:
    """The fields that all objects of one response share.

    prefix: of its id.
    kind: its `object`, and `object` of a stream's chunks.
    model: the name that the client gave.
    """

    def __init__(self, prefix: str, kind: str, chunk_kind: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._kinds = {False: kind, True: chunk_kind}
        self._rest = {"created": int(time.time()), "model": model}

    def body(self, choices: list[dict[str, Any]], *, chunk: bool, **more: Any) -> dict[str, Any]:
        """One object."""
        kind = self._kinds[chunk]
        return {"id": self.id, "object": kind, **self._rest, "choices": choices, **more}


def usage(outputs: Outputs) -> dict[str, int]:
    """Counts of tokens: of each prompt once, and of all outputs."""
    prompt, new = sum(map(len, outputs.prompts)), outputs.generated
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def whole(head: Head, writer: Writer, outputs: Outputs) -> dict[str, Any]:
    """The response as one object, once all outputs are finished."""
    gains: list[list[Gain]] = [[] for _ in range(outputs.count)]
    async for gain in outputs.gains():
        gains[gain.index].append(gain)
    choices = [writer.choice(index, each) for index, each in enumerate(gains)]
    return head.body(choices, chunk=False, usage=usage(outputs))


async def events(head: Head, writer: Writer, outputs: Outputs, first: Gain,
                 rest: AsyncIterator[Gain]) -> AsyncIterator[bytes]:  # fmt: skip
    """The response as server-sent events. first, rest: what the outputs gain.

    An output that fails ends the stream with an error object.
    """
    counted: dict[str, Any] = {"usage": None} if outputs.request.include_usage() else {}
    try:
        for choice in writer.chunks(first):
            yield _event(head.body([choice], chunk=True, **counted))
        async for gain in rest:
            for choice in writer.chunks(gain):
                yield _event(head.body([choice], chunk=True, **counted))
    except Refused as error:
        yield _event(error.body())
    else:
        if counted:
            yield _event(head.body([], chunk=True, usage=usage(outputs)))
    yield END


def _event(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
