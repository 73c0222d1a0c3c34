"""Texts in, texts out: `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_integer, shown
from specjax.generation.batching import complete_request
from specjax.generation.completion import Completion, refusal
from specjax.generation.constraints import Constraint
from specjax.generation.guided import Constraints, constraint_of_each
from specjax.generation.request import Request, row_keys, row_sampling
from specjax.generation.text import ChatTokenizer, StopStrings, TokenCodec, cut, output_text
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.logprobs import Logprobs
from specjax.speculation.sampling import Sampling
from specjax.speculation.state import Stats

Conversation = Sequence[Mapping[str, str]]
Drawn = tuple[jax.Array | None, Sampling | None]  # keys [B], and sampling in arrays [B]
_ACCEPTED = "a text, or a conversation: a list of messages with role and content"


@dataclasses.dataclass(frozen=True)
class Generation:
    """The text that a model wrote after one prompt.

    text: the new text, without a stop token; it ends before the first of the stop texts.
    tokens: int32[n], the new tokens as `decode` gives them: a stop token is among them, and so are
        the tokens up to the one that completed a stop text. int32[0] where the prompt was refused.
    finish: "stop": a stop token or a stop text ended the output; "length": max_new_tokens did, and
        what keeps to a grammar may be incomplete; "error": see `error`.
    stats: counts, int32[] each.
    logprobs: log-probabilities of `tokens`; None: not asked for, or the prompt was refused.
    error: why the prompt was refused, or why the output ended early: the model's next logits were
        NaN or infinite, or its grammar could not be followed. None: neither.
    """

    text: str
    tokens: np.ndarray
    finish: Literal["stop", "length", "error"]
    stats: Stats
    logprobs: Logprobs | None = None
    error: str | None = None


class _Options(TypedDict, total=False):
    """The options of `generate` that do not change the shape of what it returns."""

    max_new_tokens: int
    drafter: Drafter | None
    sampling: Sampling | None
    key: jax.Array | None
    stop: Sequence[str]
    stop_tokens: Sequence[int] | None
    logprobs: int | None
    constraint: Constraints
    rows: int
    cache_bits: int


@overload
def generate(
    params: Params, tokenizer: TokenCodec, texts: str | Conversation,
    *, samples: None = None, **options: Unpack[_Options],
) -> Generation: ...  # fmt: skip


@overload
def generate(
    params: Params, tokenizer: TokenCodec, texts: str | Conversation,
    *, samples: int, **options: Unpack[_Options],
) -> list[Generation]: ...  # fmt: skip


@overload
def generate(
    params: Params, tokenizer: TokenCodec, texts: list[str] | list[Conversation],
    *, samples: None = None, **options: Unpack[_Options],
) -> list[Generation]: ...  # fmt: skip


@overload
def generate(
    params: Params, tokenizer: TokenCodec, texts: list[str] | list[Conversation],
    *, samples: int, **options: Unpack[_Options],
) -> list[list[Generation]]: ...  # fmt: skip


def generate(
    params: Params,
    tokenizer: TokenCodec,
    texts: Any,
    *,
    max_new_tokens: int = 64,
    samples: int | None = None,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] | None = None,
    logprobs: int | None = None,
    constraint: Constraints = None,
    rows: int = 8,
    cache_bits: int = 16,
) -> Any:
    """Continues texts, and answers conversations.

    The tokens are those of `specjax.decode` and `specjax.decode_many` for the same prompt and key.

    Args:
      params: the model.
      tokenizer: its tokenizer.
      texts: a text; a conversation, a list of mappings with "role" and "content", which goes
        through the tokenizer's chat template; or a list of texts or conversations.
      max_new_tokens: the most tokens to generate per output, at least 1.
      samples: outputs per prompt, at least 1, drawn by `sampling`; None: one, not in a list.
      drafter: proposes tokens; default Auto().
      sampling: draws tokens, each field one number or one per prompt; None: the greedy choice.
      key: a random key, from which prompt i gets fold_in(key, i), or one per prompt; goes with
        `sampling`. With `samples`, sample j of a prompt gets fold_in(the prompt's key, j). So a
        prompt's samples do not depend on the other prompts, nor on how many samples there are.
      stop: texts that end an output.
      stop_tokens: tokens that end an output; None: the model's own; () for none.
      logprobs: k: add the log-probability of every new token, and the k most probable tokens at
        each place with theirs; None: add none. See `Logprobs`.
      constraint: a grammar that the outputs keep to, or one or None per prompt; None: they are
        free. See `Constraint`.
      rows: outputs decoded at a time; under a mesh a multiple of its data axis.
      cache_bits: bits per cache entry: 16, 8 or 4.

    Returns:
      A `Generation` for one text or conversation, a list of them for several. With `samples`, a
      list in place of each `Generation`.

    Raises:
      ValueError: an argument is out of its range; or `texts` is one text or conversation, and it
        cannot be decoded. One that cannot be decoded among several has an `error` instead.
    """
    request = Request.make(
        params, max_new_tokens=max_new_tokens, drafter=drafter, sampling=sampling,
        stop_tokens=stop_tokens, cache_bits=cache_bits, logprobs=logprobs,
        constrained=constraint is not None,
    )  # fmt: skip
    prompts, one = _listed(texts)
    asked = _Asked(
        tokenizer, prompts, _check_samples(samples, sampling), _check_stop(stop),
        constraint_of_each(constraint, len(prompts)),
    )  # fmt: skip
    drawn = row_keys(sampling, key, len(prompts)), row_sampling(sampling, len(prompts))
    answers = _answer(params, request, asked, drawn, rows)
    if one and (error := next((each.error for each in answers[0] if each.error), None)):
        raise ValueError(error)
    shaped = answers if samples is not None else [each for (each,) in answers]
    return shaped[0] if one else shaped


class _Asked(NamedTuple):
    """The prompts and how they are answered; samples: outputs per prompt."""

    tokenizer: TokenCodec
    prompts: list[Any]
    samples: int | None
    stop: tuple[str, ...]
    constraints: Sequence[Constraint | None]


def _answer(
    params: Params, request: Request, asked: _Asked, drawn: Drawn, rows: int
) -> list[list[Generation]]:
    """Returns the outputs of every prompt. drawn: each prompt's key and sampling."""
    count = asked.samples or 1
    encoded: dict[int, list[int]] = {}
    found: dict[tuple[int, int], Generation] = {}
    for number, prompt in enumerate(asked.prompts):
        try:
            encoded[number] = _encode(asked.tokenizer, prompt)
        except ValueError as error:
            found |= {(number, sample): _refused(str(error)) for sample in range(count)}
    places = [(number, sample) for number in encoded for sample in range(count)]
    ids = [encoded[number] for number, _ in places]
    stop_when = StopStrings(asked.tokenizer, ids, asked.stop) if asked.stop else None
    if places:
        keys, sampling = _of_places(drawn, places, asked.samples)
        request = dataclasses.replace(request, sampling=sampling)
        constraints = [asked.constraints[number] for number, _ in places]
        for index, completion in complete_request(
            params, request, ids, rows=rows, key=keys, constraint=constraints, stop_when=stop_when
        ):
            found[places[index]] = _generation(asked, request, ids[index], completion)
    return [
        [found[number, sample] for sample in range(count)] for number in range(len(asked.prompts))
    ]


def _of_places(drawn: Drawn, places: Sequence[tuple[int, int]], samples: int | None) -> Drawn:
    """Returns the key and the sampling of every output. places: its prompt and its sample."""
    numbers, each = np.array(places, np.int32).T
    keys, sampling = jax.tree.map(lambda leaf: leaf[numbers], drawn)
    if samples is not None and keys is not None:
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.asarray(each))
    return keys, sampling


def _generation(
    asked: _Asked, request: Request, prompt: Sequence[int], completion: Completion
) -> Generation:
    if completion.error is not None and not len(completion.tokens):
        return _refused(completion.error)
    tokens = completion.tokens[len(prompt) :]
    whole = output_text(asked.tokenizer, prompt, tokens.tolist(), request.stop_tokens)
    text = cut(whole, asked.stop)
    full = len(tokens) == request.max_new_tokens
    stopped = text != whole or not full or tokens[-1] in request.stop_tokens
    ended: Literal["stop", "length"] = "stop" if stopped else "length"
    return Generation(
        text, tokens, "error" if completion.error else ended, completion.stats,
        completion.logprobs, completion.error,
    )  # fmt: skip


def _refused(error: str) -> Generation:
    refused = refusal(error)
    return Generation("", refused.tokens, "error", refused.stats, error=error)


def _listed(texts: Any) -> tuple[list[Any], bool]:
    """Returns the texts and conversations, and whether it is one that is not in a list."""
    if isinstance(texts, str):
        return [texts], True
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping | bytes):
        raise ValueError(f"texts must be {_ACCEPTED}, or a list of them, got {shown(texts)}")
    listed = list(texts)
    if not listed:
        raise ValueError("texts must hold at least one text or conversation, got none")
    if isinstance(listed[0], Mapping):
        return [listed], True
    return listed, False


def _encode(tokenizer: TokenCodec, prompt: Any) -> list[int]:
    """Returns the tokens of a text or a conversation. Raises ValueError if it is neither."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence) or not all(isinstance(each, Mapping) for each in prompt):
        raise ValueError(f"a prompt must be {_ACCEPTED}, got {shown(prompt)}")
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(
            f"a conversation needs a tokenizer with a chat template, got {shown(tokenizer)}"
        )
    return tokenizer.encode(tokenizer.chat(prompt), special_tokens=False)


def _check_samples(samples: int | None, sampling: Sampling | None) -> int | None:
    if samples is None:
        return None
    if check_integer("samples", samples) < 1:
        raise ValueError(f"samples must be at least 1 or None, got {samples}")
    if sampling is None:
        raise ValueError("samples goes with sampling: pass sampling=specjax.Sampling(...) as well")
    return int(samples)


def _check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not listed or not all(isinstance(each, str) and each for each in stop):
        raise ValueError(f"stop must be a list of texts that are not empty, got {shown(stop)}")
    return tuple(stop)
