"""The routes: OpenAI's, and those by which others watch a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse

from specjax.checks import printable, shown
from specjax.generation.text import ToolTokenizer
from specjax.serving import chat, completions
from specjax.serving.engine import Engine
from specjax.serving.errors import Refused, error_body
from specjax.serving.grammars import open_guide
from specjax.serving.limits import Limits
from specjax.serving.outputs import Gain, Outputs
from specjax.serving.requests import ChatRequest, Common, CompletionRequest
from specjax.serving.responses import Head, Writer, events, whole
from specjax.serving.token_texts import TokenTexts
from specjax.serving.tools import writes_calls
from specjax.version import __version__

T = TypeVar("T")
LOG = "specjax.requests"  # the logger of requests, a line of JSON each
_UNKNOWN_CALLS = (
    "tool_choice can ask for a call only where the model's chat template has it written as "
    '<tool_call>{"name": …, "arguments": …}</tool_call>, and this one does not'
)


@dataclasses.dataclass(frozen=True)
class Door:
    """How the server shows itself.

    name: the model's name, as clients give it.
    most_bytes: the most bytes of a request's body.
    key: what clients must send; None: nothing.
    log_prompts: write prompts into the log.
    """

    name: str
    most_bytes: int = 2**20
    key: str | None = None
    log_prompts: bool = False


def make_app(engine: Engine, tokenizer: ToolTokenizer, door: Door) -> Limits:
    """Returns the application, for uvicorn."""
    app = FastAPI(title="specjax", version=__version__, docs_url=None, redoc_url=None)
    _Routes(engine, tokenizer, door).add(app)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http)
    return Limits(app, door.most_bytes, door.key)


class _Routes:
    def __init__(self, engine: Engine, tokenizer: ToolTokenizer, door: Door) -> None:
        self._engine, self._tokenizer, self._door = engine, tokenizer, door
        self._texts, self._created = TokenTexts(tokenizer), int(time.time())
        self._calls = writes_calls(tokenizer)
        watch = engine.metrics.watch
        watch("num_requests_running", "outputs that have a row", lambda: engine.running)
        watch(
            "num_requests_waiting", "outputs that wait for a row",
            lambda: max(0, engine.open - engine.running),
        )  # fmt: skip
        watch("num_rows", "rows", lambda: engine.plan.rows)
        watch("num_programs_to_compile", "that would cost less", lambda: engine.compiling)
        watch("kv_cache_usage_perc", "share of the cache's slots in use", engine.cache_usage)
        for name, field, help_ in (
            ("prefix_cache_queries", "asked", "tokens of prompts that were looked up"),
            ("prefix_cache_hits", "found", "those of them that were read before"),
            ("prefix_cache_bytes", "nbytes", "bytes of what prompts share"),
        ):
            watch(name, help_, partial(_of_prefixes, engine, field))

    def add(self, app: FastAPI) -> None:
        """Adds all routes."""
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)

    async def health(self) -> Response:
        """Whether the server takes requests."""
        if self._engine.draining:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Counts for Prometheus."""
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model by its name."""
        self._check_name(name)
        return self._card()

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        """Continues texts."""
        self._check(asked)
        if asked.best_of not in (None, asked.n or 1):
            raise Refused(400, "best_of must be n, or left out", param="best_of")
        prompts = await run_in_threadpool(self._encoded, asked)
        new, most = asked.max_tokens or 16, asked.logprobs
        outputs = await self._outputs(asked, prompts, new, most, asked.echo)
        echoes = [""] * len(prompts)
        if asked.echo:
            given = zip(asked.prompts(), prompts, strict=True)
            echoes = [g if isinstance(g, str) else self._tokenizer.decode(ids) for g, ids in given]
        writer = completions.CompletionWriter(asked, outputs, self._texts, echoes)
        return await self._answer(request, completions.head(asked), writer, outputs)

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """Answers a conversation."""
        self._check(asked)
        asked.check_logprobs()
        functions = asked.tools_to_call()
        if functions and not self._calls:
            raise Refused(400, _UNKNOWN_CALLS, param="tool_choice")
        prompt = await run_in_threadpool(self._rendered, asked)
        new = asked.max_completion_tokens or asked.max_tokens
        most = (asked.top_logprobs or 0) if asked.logprobs else None
        outputs = await self._outputs(asked, [prompt], new, most, functions=functions)
        tools = asked.tools_shown() if self._calls else None
        names = {tool["function"]["name"] for tool in tools or ()}
        writer = chat.ChatWriter(asked, self._texts, names)
        return await self._answer(request, chat.head(asked), writer, outputs)

    def _check(self, asked: Common) -> None:
        self._check_name(asked.model)
        asked.check_stream()

    def _check_name(self, name: str) -> None:
        if name != self._door.name:
            message = f"the model here is {self._door.name!r}, got {shown(name)}"
            raise Refused(404, message, param="model", code="model_not_found")

    async def _outputs(
        self, asked: Common, prompts: Sequence[Sequence[int]], new: int | None, most: int | None,
        echo: bool | None = False, functions: Sequence[Mapping[str, Any]] = (),
    ) -> Outputs:  # fmt: skip
        """The outputs of a request. most: log-probabilities at each place; None: none. functions:
        those of which the outputs must call one."""
        limit = self._engine.plan.logprobs
        if most is not None and most > limit:
            message = f"log-probabilities of up to {limit} tokens may be asked for, got {most}"
            raise Refused(400, message, param="logprobs")
        scored = most is not None
        guide = await run_in_threadpool(open_guide, self._engine, self._tokenizer, asked, functions)
        return Outputs(
            self._engine, self._tokenizer, asked, prompts, new, scored, bool(echo) and scored, guide
        )

    def _encoded(self, asked: CompletionRequest) -> list[list[int]]:
        """The tokens of every prompt."""
        try:
            return [
                self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                for prompt in asked.prompts()
            ]
        except ValueError as error:
            raise Refused(400, printable(error, 500), param="prompt") from None

    def _rendered(self, asked: ChatRequest) -> list[int]:
        """The tokens of the conversation in the model's chat template."""
        try:
            text = self._tokenizer.chat(asked.conversation(), tools=asked.tools_shown())
            return self._tokenizer.encode(text, special_tokens=False)
        except ValueError as error:
            raise Refused(400, printable(error, 500), param="messages") from None

    async def _answer(
        self, request: Request, head: Head, writer: Writer, outputs: Outputs
    ) -> Response:
        if not outputs.request.stream:
            try:
                body = await _while_there(request, whole(head, writer, outputs))
            finally:
                self._write(head, outputs)
            return JSONResponse(body)
        gains = outputs.gains()
        # A full queue is a status, not an event: the response begins with the first gain.
        try:
            first = await _while_there(request, anext(gains))
        except BaseException:
            self._write(head, outputs)
            raise
        stream = self._logged(head, outputs, events(head, writer, outputs, first, gains), gains)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _logged(
        self, head: Head, outputs: Outputs, stream: AsyncIterator[bytes],
        gains: AsyncIterator[Gain],
    ) -> AsyncIterator[bytes]:  # fmt: skip
        """The stream; its outputs are given up when nobody reads it any more."""
        try:
            async for each in stream:
                yield each
        finally:
            await gains.aclose()  # type: ignore[attr-defined]
            self._write(head, outputs)

    def _write(self, head: Head, outputs: Outputs) -> None:
        """Logs a request in one line."""
        line = {
            "id": head.id,
            "prompt_tokens": sum(map(len, outputs.prompts)),
            "completion_tokens": outputs.generated,
            "finish": [outputs.finishes.get(index) for index in range(outputs.count)],
            "first_seconds": None if outputs.first is None else round(outputs.first, 4),
            "seconds": round(time.perf_counter() - outputs.begun, 4),
        }
        if self._door.log_prompts:
            line["prompts"] = [self._tokenizer.decode(prompt) for prompt in outputs.prompts]
        logging.getLogger(LOG).info("%s", json.dumps(line))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._door.name, "object": "model", "created": self._created,
            "owned_by": "specjax", "max_model_len": self._engine.plan.context,
        }  # fmt: skip


def _of_prefixes(engine: Engine, field: str) -> float:
    """A count of the prefix cache; 0 without one."""
    return float(getattr(engine.prefixes, field, 0))


async def _while_there(request: Request, answer: Awaitable[T]) -> T:
    """Waits for an answer as long as the client does, and gives it up with the client."""
    making, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((making, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise Refused(499, "the client has gone")
        return making.result()
    finally:
        making.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _invalid(_: Request, error: Exception) -> Response:
    """A body that is not a valid request, in one sentence."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return JSONResponse(error_body(400, f"the body is not JSON: {first['ctx']['error']}"), 400)
    names = [str(part) for part in first["loc"][1:]]
    field = names[0] if names else "the body"
    where = ".".join(names) if len(found) == 1 else field
    same = [each for each in found if str(each["loc"][1:2]) == str(first["loc"][1:2])]
    reasons = dict.fromkeys(_reason(each["msg"]) for each in same)
    message = f"{printable(where)} {' or '.join(reasons)}"
    if first["type"] not in ("missing", "extra_forbidden"):
        message += f", got {shown(first['input'])}"
    return JSONResponse(error_body(400, message, printable(field)), 400)


def _reason(text: str) -> str:
    """Pydantic's sentence about a value, as the end of one of ours."""
    if text == "Field required":
        return "is missing"
    if text == "Extra inputs are not permitted":
        return "is not a field of this request"
    return text.replace("Input should", "must").replace("should", "must")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, str(error.detail))
    return JSONResponse(body, error.status_code, error.headers)
