"""Makes an engine for a model, and the server around it as an ASGI application for servers that
others run."""

from __future__ import annotations

from collections.abc import Callable

from specjax.generation.request import Request
from specjax.generation.text import ToolTokenizer
from specjax.model.parallel import check_rows
from specjax.model.params import Params
from specjax.serving.app import Door, make_app
from specjax.serving.engine import Engine
from specjax.serving.grammars import grammars_possible
from specjax.serving.limits import Limits
from specjax.serving.metrics import Metrics
from specjax.serving.room import make_plan
from specjax.speculation.drafter import Drafter


def application(
    params: Params,
    tokenizer: ToolTokenizer,
    name: str,
    *,
    rows: int | None = None,
    context: int | None = None,
    drafter: Drafter | None = None,
    cache_bits: int = 16,
    key: str | None = None,
) -> Limits:
    """Returns an ASGI application that answers OpenAI's clients.

    Its programs are compiled before it returns. The engine's thread ends with the process.

    Args:
      params: the model.
      tokenizer: what `specjax.load_tokenizer` returns.
      name: the model's name for clients.
      rows: outputs made at a time; None: 8.
      context: tokens of a prompt and its output; None: 2048, or as many as the model has.
      drafter: proposes tokens; None: `specjax.Auto`.
      cache_bits: bits per entry of the KV cache: 16, 8 or 4.
      key: what clients must send as a bearer token; None: nothing.

    Raises:
      ValueError: an argument is out of its range, or the caches do not fit.
    """
    engine = make_engine(params, drafter=drafter, cache_bits=cache_bits, rows=rows, context=context)
    engine.start()
    return make_app(engine, tokenizer, Door(name, key=key))


def make_engine(
    params: Params,
    *,
    drafter: Drafter | None,
    cache_bits: int,
    rows: int | None,
    context: int | None,
    most_bytes: int | None = None,
    queue: int = 64,
    prefix_bytes: int = 2**28,
    logprobs: int = 20,
    told: Callable[..., None] | None = None,
) -> Engine:
    """Returns an engine that has not started. The arguments are those of `application`, of
    `make_plan`, which says what is raised, and of `Engine`."""
    request = Request.make(
        params, drafter=drafter, cache_bits=cache_bits, constrained=grammars_possible(params)
    )
    plan = make_plan(
        params.config, request, rows=rows, context=context, most_bytes=most_bytes, queue=queue,
        prefix_bytes=prefix_bytes, logprobs=logprobs,
    )  # fmt: skip
    check_rows(params.mesh, plan.rows)
    return Engine(params, request, plan, Metrics(), told)
