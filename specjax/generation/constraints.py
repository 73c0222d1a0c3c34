"""Structured output: grammars that outputs keep to, by llguidance.

llguidance says which tokens may follow a text. It works on the host, a few microseconds per token,
and is imported when the first constraint is made.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specjax.checks import printable, shown

CANNOT_BE_FOLLOWED = "the grammar cannot be followed"  # begins an error
_MOST_CHARACTERS = 2**20  # of a schema, a pattern or a grammar
SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@runtime_checkable
class TokenBytes(Protocol):
    """A tokenizer that knows the bytes of its tokens; `specjax.load_tokenizer` returns one."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def vocabulary(self) -> list[bytes | str | None]: ...

    def __hash__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A grammar that an output must keep to. Made by `json_schema`, `regex` or `lark`.

    A token that would leave the grammar is never chosen, and a stop token only where the text is
    complete. An output that max_new_tokens ends may be incomplete.

    Each token is chosen among those that the grammar allows at its place, with their probabilities
    scaled to a sum of 1. That is not the model's distribution over all texts of the grammar.

    grammar: the grammar, as llguidance writes it.
    tokenizer: the model's tokenizer.
    drafts: whether tokens that the grammar forces are drafted. The output does not depend on it.
    """

    grammar: str
    tokenizer: TokenBytes
    drafts: bool = True

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, tokenizer: TokenBytes) -> Constraint:
        """Returns the constraint to JSON values of a schema, in one line, written as by Python's
        `json.dumps`.

        Args:
          schema: a JSON schema, as a mapping or as text.
          tokenizer: the model's tokenizer, as `specjax.load_tokenizer` returns it.

        Raises:
          ValueError: the schema is not valid, or has keywords that llguidance cannot follow.
        """
        if not isinstance(schema, Mapping | str):
            raise ValueError(f"a JSON schema must be a mapping or a text, got {shown(schema)}")
        try:
            text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a JSON schema must hold JSON values: {printable(error)}") from None
        _check_size("a JSON schema", text)
        try:
            grammar = _matcher_class().grammar_from_json_schema(text, overrides=SEPARATORS)
        except ValueError as error:
            raise ValueError(f"a JSON schema must be a JSON object: {_sentence(error)}") from None
        return cls._checked("the JSON schema", grammar, tokenizer)

    @classmethod
    def regex(cls, pattern: str, tokenizer: TokenBytes) -> Constraint:
        """Returns the constraint to texts that a regular expression matches from end to end.

        Args:
          pattern: a regular expression of Rust's `regex`, without look-around and back-references.
          tokenizer: the model's tokenizer, as `specjax.load_tokenizer` returns it.

        Raises:
          ValueError: the expression is not valid.
        """
        _check_size("a regular expression", pattern)
        grammar = _matcher_class().grammar_from_regex(pattern)
        return cls._checked("the regular expression", grammar, tokenizer)

    @classmethod
    def lark(cls, grammar: str, tokenizer: TokenBytes) -> Constraint:
        """Returns the constraint to texts of a context-free grammar.

        Args:
          grammar: a grammar like those of the Lark library, which begins at the rule `start`.
          tokenizer: the model's tokenizer, as `specjax.load_tokenizer` returns it.

        Raises:
          ValueError: the grammar is not valid.
        """
        _check_size("a grammar", grammar)
        written = _matcher_class().grammar_from_lark(grammar)
        return cls._checked("the grammar", written, tokenizer)

    @classmethod
    def _checked(cls, name: str, grammar: str, tokenizer: TokenBytes) -> Constraint:
        if not isinstance(tokenizer, TokenBytes):
            raise ValueError(
                f"tokenizer must be what specjax.load_tokenizer returns, got {shown(tokenizer)}"
            )
        wrong, messages = _matcher_class().validate_grammar_with_warnings(grammar)
        if wrong:
            raise ValueError(f"{name} is refused: {_sentence(messages[0])}")
        return cls(grammar, tokenizer)

    def guide(self, vocab_size: int, stop_tokens: tuple[int, ...]) -> Guide:
        """Returns a guide at the beginning of an output.

        Raises ValueError if there are no stop tokens, or the tokenizer is not the model's.
        """
        matcher = _matcher(self.grammar, self.tokenizer, vocab_size, stop_tokens)
        return Guide(matcher, stop_tokens, self.drafts)


class Guide:
    """Where an output is in its grammar.

    Args:
      matcher: llguidance's matcher, which the guide copies.
      stop_tokens: tokens that end the output.
      drafts: whether forced tokens are drafted.
    """

    def __init__(self, matcher: Any, stop_tokens: tuple[int, ...], drafts: bool) -> None:
        self._matcher, self._stop_tokens, self._drafts = matcher.deep_copy(), stop_tokens, drafts
        self._broken = False

    def copy(self) -> Guide:
        """Returns another guide at the same place."""
        return Guide(self._matcher, self._stop_tokens, self._drafts)

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None: it can."""
        reason = self._matcher.get_error()
        if not reason and not self._broken:
            return None
        return f"{CANNOT_BE_FOLLOWED}: {_sentence(reason or 'it is too complex')}"

    def advance(self, tokens: Sequence[int]) -> None:
        """Goes past tokens of the output."""
        text = [token for token in tokens if token not in self._stop_tokens]
        if text:
            self._matcher.consume_tokens(text)
        # Where llguidance reaches a limit, it allows nothing but a stop token.
        self._broken = len(text) < len(tokens) and not self._matcher.is_accepting()

    def forced(self, most: int) -> list[int]:
        """Returns the next tokens of the only text that the grammar allows, at most so many.

        The model may still split that text into other tokens.
        """
        if not self._drafts:
            return []
        ahead = self._matcher.deep_copy()
        tokens: list[int] = ahead.compute_ff_tokens()
        ahead.try_consume_tokens(tokens)
        ended = len(self._stop_tokens) == 1 and ahead.is_stopped()
        return [*tokens, *(self._stop_tokens if ended else ())][:most]

    def allow(
        self, tokens: Sequence[int], places: Sequence[tuple[int, int]], masks: np.ndarray
    ) -> None:
        """Writes which tokens may follow the last one, and each drafted one.

        Args:
          tokens: int32[N], drafts.
          places: the numbers and depths of those that count, each after its parent and followed by
            its descendants.
          masks: uint32[N + 1, W], all ones. Places that the grammar does not reach stay so.
        """
        _write(self._matcher, masks[0])
        ahead, path = self._matcher.deep_copy(), list[int]()
        for node, level in places:
            if level > len(path):  # below a token that the grammar does not allow
                continue
            ahead.rollback(len(path) - level)
            del path[level:]
            token = tokens[node]
            if token not in self._stop_tokens and ahead.try_consume_tokens([token]):
                path.append(token)
                _write(ahead, masks[node + 1])
            if ahead.is_error():  # a limit: only the output that comes there ends
                _write(ahead, masks[node + 1])
                ahead = self._matcher.deep_copy()
                ahead.consume_tokens(path)


def _write(matcher: Any, mask: np.ndarray) -> None:
    """Writes a matcher's mask, uint32[W]; the model's vocabulary may be the larger one."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(mask)]
    mask[: len(bits)], mask[len(bits) :] = bits, 0


@lru_cache(maxsize=32)  # a grammar may be as long as a request
def _matcher(
    grammar: str, tokenizer: TokenBytes, vocab_size: int, stop_tokens: tuple[int, ...]
) -> Any:
    """Returns a matcher at the beginning, which nobody may move."""
    if not stop_tokens:
        raise ValueError("a constraint needs a stop token, which ends its output; got none")
    view = _tokenizer(tokenizer, vocab_size, stop_tokens)
    matcher = _matcher_class()(view, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the constraint is refused: {_sentence(matcher.get_error())}")
    return matcher


@lru_cache(maxsize=16)
def _tokenizer(tokenizer: TokenBytes, vocab_size: int, stop_tokens: tuple[int, ...]) -> Any:
    """Returns llguidance's view of a tokenizer."""
    words = tokenizer.vocabulary()
    if len(words) > vocab_size:
        raise ValueError(
            f"the constraint must be made with the model's tokenizer, of at most {vocab_size} "
            f"tokens, got one with token ids up to {len(words) - 1}"
        )
    view = _View(tokenizer, words, stop_tokens)
    return _llguidance().LLTokenizer(view, eos_token=list(stop_tokens))


class _View:
    """A tokenizer as llguidance reads it. Special tokens are not text; neither are stop tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: TokenBytes,
        words: list[bytes | str | None],
        stop_tokens: tuple[int, ...],
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_tokens[0]
        self.tokens = [word.encode() if isinstance(word, str) else word or b"" for word in words]
        self.special_token_ids = [
            token
            for token, word in enumerate(words)
            if isinstance(word, str) or token in stop_tokens
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ValueError(
            "a constraint needs llguidance: pip install 'specjax[structured]'"
        ) from None


def _matcher_class() -> Any:
    return _llguidance().LLMatcher


def _check_size(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must be a text that is not empty, got {shown(text)}")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{name} must have at most {_MOST_CHARACTERS} characters, got {len(text)}")


def _sentence(reason: object) -> str:
    """Returns a message of several lines as one, without the lines that quote the source."""
    lines = [line.strip() for line in str(reason).splitlines()]
    told = [line for line in lines[1:] if line.startswith("error:")]
    return printable(re.sub(r"\s+", " ", " ".join([*lines[:1], *told])))
