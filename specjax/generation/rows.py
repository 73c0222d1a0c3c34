"""The prompts of a batch as the loop takes them, and lengths in buckets.

A compiled program has one length of prompts and one of outputs. Prompts are padded to the length of
their bucket and buffers have room for a bucket of new tokens, so that like lengths share a program.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.generation.prompts import Lengths, Prompt, normalize_prompt
from specjax.generation.request import Request, row_keys, row_sampling
from specjax.model.parallel import check_rows
from specjax.model.params import Params
from specjax.speculation.sampling import Sampling

_LEAST = 16  # tokens


class Rows(NamedTuple):
    """The prompts of a batch.

    tokens: int32[B, T], right-padded.
    lengths: int32[B].
    limits: int32[B], lengths at which rows end.
    keys: one random key per row, [B], or None when decoding greedily.
    sampling: how each row draws, in arrays [B], or None.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    keys: jax.Array | None
    sampling: Sampling | None


def prompt_rows(
    params: Params,
    request: Request,
    prompt: Prompt,
    prompt_lengths: Lengths | None = None,
    key: jax.Array | None = None,
) -> Rows:
    """Returns checked prompts. Arguments and errors as in `specjax.decode`."""
    tokens, lengths = normalize_prompt(prompt, prompt_lengths, params.config)
    count = tokens.shape[0]
    check_rows(params.mesh, count)
    keys, sampling = row_keys(request.sampling, key, count), row_sampling(request.sampling, count)
    return Rows(tokens, lengths, lengths + request.max_new_tokens, keys, sampling)


def fitted(params: Params, request: Request, rows: Rows) -> tuple[Request, Rows]:
    """Returns the request for prompts that are as wide as these, and the prompts.

    The prompts have the sampling, not the request. Raises ValueError if they do not fit.
    """
    count, width = rows.tokens.shape
    return _without_sampling(request.for_width(params, width, count)), rows


def bucketed(params: Params, request: Request, rows: Rows) -> tuple[Request, Rows]:
    """`fitted` for prompts that are padded to the width of their bucket.

    Prompts that are traced, or that are on other hosts, stay as they are.
    """
    if isinstance(rows.tokens, jax.core.Tracer) or not rows.tokens.is_fully_addressable:
        return fitted(params, request, rows)
    count, own = rows.tokens.shape
    request, width = widened(params, request, own, count)
    tokens = np.pad(np.asarray(rows.tokens), ((0, 0), (0, width - own)))
    return _without_sampling(request), rows._replace(tokens=jnp.asarray(tokens))


def widened(params: Params, request: Request, width: int, rows: int) -> tuple[Request, int]:
    """Returns the request and the width of the bucket that prompts of up to `width` tokens are in.

    Width and new tokens stay as they are where the bucket has no room in the model, the drafter,
    the memory, or a cache of a given capacity. Raises ValueError if the prompts do not fit.
    """
    request.slots(params.config, width)  # bad numbers are refused before they are made wide
    wide = dataclasses.replace(request, max_new_tokens=bucket(request.max_new_tokens))
    try:
        return wide.for_width(params, bucket(width), rows), bucket(width)
    except ValueError:
        return request.for_width(params, width, rows), width


def bucket(length: int) -> int:
    """Returns the least of 16, 24, 32, 48, 64, 96, … that is not less than `length`."""
    size = _LEAST
    while size < length:
        size = size * 3 // 2 if size.bit_count() == 1 else size * 4 // 3
    return size


def _without_sampling(request: Request) -> Request:
    return dataclasses.replace(request, sampling=None)
