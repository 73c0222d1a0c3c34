"""The rounds of an output on the terminal: the text as it comes, and where each token came from."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from specjax.generation.streaming import Round
from specjax.generation.text import TextStream


def summary(rounds: Sequence[Round], seconds: float, waited: float) -> str:
    """Acceptance, and speed without the first round, which waits for the compiler."""
    tokens = sum(len(each.tokens) for each in rounds)
    accepted = sum(len(each.accepted) for each in rounds)
    drafted = sum(each.drafted for each in rounds)
    timed = tokens - len(rounds[0].tokens)
    parts = [f"{tokens} tokens in {len(rounds)} rounds ({tokens / len(rounds):.2f} per round)"]
    if drafted:
        share = f"{accepted / drafted:.0%}{_by_source(rounds)}"
        parts.append(f"{accepted} of {drafted} drafts accepted ({share})")
    if timed:
        parts.append(f"{timed / seconds:.1f} tokens/s")
    return ", ".join(parts) + f" after {waited:.1f} s of preparation"


def _by_source(rounds: Sequence[Round]) -> str:
    """The drafts of each part of a drafter that has several."""
    counts: dict[str, list[int]] = {}
    for each in rounds:
        if each.source is not None:
            count = counts.setdefault(each.source, [0, 0])
            count[0] += len(each.accepted)
            count[1] += each.drafted
    return "".join(f"; {name} {kept} of {all_}" for name, (kept, all_) in sorted(counts.items()))


def without(each: Round, tokens: Sequence[int]) -> Round:
    """The round without some tokens."""
    accepted, rejected, given = (
        [token for token in kind if token not in tokens]
        for kind in (each.accepted, each.rejected, each.given)
    )
    return dataclasses.replace(each, accepted=accepted, rejected=rejected, given=given)


class Plain:
    """Prints the text as it comes."""

    def __init__(self, text: TextStream) -> None:
        self._text = text

    def __call__(self, each: Round) -> None:
        print(self._text.push(each.tokens), end="", flush=True)

    def finish(self) -> None:
        print(self._text.finish(), end="", flush=True)


_STYLES = {  # where a token came from -> its colour, and its marks where there are no colours
    "accepted": ("\033[32m", "", ""),
    "rejected": ("\033[9;31m", "[-", "-]"),
    "given": ("\033[34m", "{+", "+}"),
}


class Trace(Plain):
    """Prints the text coloured by where it came from, rejected drafts included (QSpec, figure 3).

    A character of several tokens has the colour of the last.
    """

    def __call__(self, each: Round) -> None:
        for token in each.accepted:
            _print_styled("accepted", self._text.push([token]))
        _print_styled("rejected", self._text.peek(each.rejected))
        _print_styled("given", self._text.push(each.given))


def _print_styled(name: str, text: str) -> None:
    if text:
        print(_styled(name, text), end="", flush=True)


def legend() -> str:
    """The meaning of the styles."""
    return ", ".join(
        (
            _styled("accepted", "drafted and accepted"),
            _styled("rejected", "drafted and rejected"),
            _styled("given", "given by the verifier"),
        )
    )


def _styled(name: str, text: str) -> str:
    colour, left, right = _STYLES[name]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"{colour}{text}\033[0m"
    return f"{left}{text}{right}"
