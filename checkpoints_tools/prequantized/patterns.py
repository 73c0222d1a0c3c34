r"""The regular expressions that choose layers, matched in time linear in pattern and name.

Python's matcher goes back, and a short pattern keeps it busy for ever. This one follows all places
in the name at once, so it reads a part of regular expressions: characters, `.`, classes such as
`\d` and `[0-9]`, their repetition by `*`, `+` and `?`, `^`, `$`, and groups such as `(q|k|v)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import reduce

from specjax.checks import shown

PATTERN = "re:"  # begins the name of layers that is a regular expression
MOST_CHARACTERS = 10_000  # of all patterns of a model; real ones have a few dozen each
MOST_GROUPS = 8  # inside one another
_TOKEN = re.compile(
    r"(?P<open>\((?:\?:)?)|(?P<close>\))(?P<absent>\?)?|(?P<or>\|)|(?P<start>\^)|(?P<end>\$)"
    r"|(?P<one>\\[dDwWsS]|\\[^a-zA-Z0-9]|\[\^?(?:\w-\w|[\w.]|\\[dws.-])+-?\]"
    r"|[^\\\[\](){}*+?|^$])(?P<times>[*+?]?)\??"
)

Step = Callable[[str, set[int]], set[int]]  # from places in a name to those after a match


def compile_patterns(patterns: Collection[str]) -> dict[str, Callable[[str], bool]]:
    """A test of names for each pattern, which must match the beginning of a name.

    Raises ValueError if a pattern holds anything else, or all of them more than MOST_CHARACTERS.
    """
    if (count := sum(map(len, patterns))) > MOST_CHARACTERS:
        raise ValueError(
            f"quantization_config: the patterns have {count} characters; "
            f"accepted: up to {MOST_CHARACTERS}"
        )
    return {pattern: _test(_parsed(pattern)) for pattern in patterns}


def _test(step: Step) -> Callable[[str], bool]:
    return lambda name: bool(step(name, {0}))


def _parsed(pattern: str) -> Step:
    groups: list[list[list[Step]]] = [[[]]]  # the open ones: alternatives, each a sequence
    place = len(PATTERN)
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None:
            raise _refusal(pattern)
        place = token.end()
        if token["open"]:
            groups.append([[]])
        elif token["or"]:
            groups[-1].append([])
        elif token["close"] and len(groups) > 1:
            step = _any_of(groups.pop())
            groups[-1][-1].append(_maybe(step) if token["absent"] else step)
        elif token["close"]:
            raise _refusal(pattern)
        else:
            groups[-1][-1].append(_single(token, pattern))
        if len(groups) > MOST_GROUPS:
            raise _refusal(pattern)
    if len(groups) > 1:
        raise _refusal(pattern)
    return _any_of(groups[0])


def _single(token: re.Match[str], pattern: str) -> Step:
    """The step of an anchor, or of a character that may be repeated."""
    if token["start"]:
        return lambda name, places: places & {0}
    if token["end"]:
        return lambda name, places: places & {len(name)}
    try:
        accepted = re.compile(token["one"]).match
    except re.error:
        raise _refusal(pattern) from None

    def once(name: str, places: set[int]) -> set[int]:
        return {i + 1 for i in places if i < len(name) and accepted(name, i)}

    def often(name: str, places: set[int]) -> set[int]:
        reached, new = places, places
        while new:
            new = once(name, new) - reached
            reached = reached | new
        return reached

    return {
        "": once,
        "?": _maybe(once),
        "*": often,
        "+": lambda name, places: often(name, once(name, places)),
    }[token["times"]]


def _maybe(step: Step) -> Step:
    return lambda name, places: places | step(name, places)


def _any_of(sequences: list[list[Step]]) -> Step:
    def step(name: str, places: set[int]) -> set[int]:
        ends = (reduce(lambda now, each: each(name, now), steps, places) for steps in sequences)
        return set().union(*ends)

    return step


def _refusal(pattern: str) -> ValueError:
    return ValueError(
        f"quantization_config: the pattern {shown(pattern)} is not supported; supported: "
        "characters, classes such as [0-9], *, + and ? behind them, and groups such as (q|k|v)"
    )
