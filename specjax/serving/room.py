"""How many rows of how many tokens a server has room for."""

from __future__ import annotations

from specjax.checks import check_integer, shown
from specjax.generation.request import Request
from specjax.model.config import ModelConfig
from specjax.model.sizes import cache_bytes, in_units, most_that_fits
from specjax.serving.asks import Plan

_ROWS, _CONTEXT = 8, 2048
_MOST_ROWS = 4096


def make_plan(
    config: ModelConfig,
    request: Request,
    *,
    rows: int | None,
    context: int | None,
    most_bytes: int | None,
    queue: int,
    prefix_bytes: int,
    logprobs: int,
) -> Plan:
    """Plans the rows and the context of an engine.

    Args:
      config: the model's.
      request: the drafter and the bits of the cache.
      rows: outputs made at a time; None: as many as fit into `most_bytes`, or else 8.
      context: tokens of a prompt and its output; None: 2048, or as many as the model has.
      most_bytes: the most that all KV caches may take; None: no limit but the machine's.
      queue, prefix_bytes, logprobs: as in `Plan`.

    Raises:
      ValueError: one of them is out of its range, or the caches do not fit.
    """
    for name, given in (("queue", queue), ("prefix_bytes", prefix_bytes)):
        if check_integer(name, given) < 0:
            raise ValueError(f"{name} must be at least 0, got {given}")
    positions = config.max_position_embeddings
    context = min(_CONTEXT, positions) if context is None else check_integer("context", context)
    if not 4 <= context <= positions:
        raise ValueError(f"context must be in 4 … {positions}, got {context}")
    fits = None if most_bytes is None else _rows(config, request, context, most_bytes)
    if rows is None:
        rows = _ROWS if fits is None else fits
    if not 1 <= check_integer("rows", rows) <= _MOST_ROWS:
        raise ValueError(f"rows must be in 1 … {_MOST_ROWS}, got {shown(rows)}")
    if fits is not None and rows > fits:
        raise ValueError(
            f"{rows} rows of {context} tokens do not fit into {in_units(most_bytes or 0)}: "
            f"{fits} rows would"
        )
    if not 0 <= logprobs <= config.vocab_size:
        raise ValueError(f"logprobs must be in 0 … {config.vocab_size}, got {logprobs}")
    return Plan(rows, context, queue, prefix_bytes, logprobs)


def _rows(config: ModelConfig, request: Request, context: int, most: int) -> int:
    """The rows that fit beside the one into which a prompt is read. Raises ValueError if none."""
    slots = context + request.reach - 1

    def needed(rows: int) -> int:
        return cache_bytes(config, rows + 1, slots, request.cache_bits)

    fits = most_that_fits(most, needed, _MOST_ROWS)
    if fits < 1:
        raise ValueError(
            f"{in_units(most)} hold no row of {context} tokens: one needs {in_units(needed(1))}"
        )
    return fits
