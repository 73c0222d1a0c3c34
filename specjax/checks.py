"""Checks of single values, shared by several rooms, and foreign values as messages show them."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import reprlib
from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], None]  # of a field's name and value; raises ValueError


def check_integer(name: str, value: Any) -> int:
    """Returns `value` as an int of at most 64 bits; accepts NumPy integers.

    Raises ValueError for anything else.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {shown(value)}") from None
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{name} must be an integer of at most 64 bits, got {shown(found)}")
    return found


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a float; accepts NumPy's numbers and arrays of one number without axes.

    Raises ValueError for anything else, also for an array whose value JAX does not know yet.
    """
    try:
        found = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(found, bool) or not isinstance(found, numbers.Real):
            raise TypeError
        return float(found)
    except (TypeError, OverflowError):
        raise ValueError(f"{name} must be a number, got {shown(value)}") from None


def check_seed(name: str, value: Any) -> int:
    """Returns a seed as an int. Raises ValueError unless it is in 0 … 2³² - 1."""
    seed = check_integer(name, value)
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} must be an integer from 0 to {2**32 - 1}, got {seed}")
    return seed


@dataclasses.dataclass(frozen=True)
class Whole:
    """The check that a field holds an integer from `least` to `most`."""

    least: int
    most: int

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError unless it does."""
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not self.least <= value <= self.most
        ):
            accepted = f"an integer from {self.least} to {self.most}"
            raise ValueError(f"{name} must be {accepted}, got {shown(value)}")


@dataclasses.dataclass(frozen=True)
class Number:
    """The check that a field holds a number from `least`, or above `above`, to `most`."""

    most: float
    least: float = -math.inf
    above: float = -math.inf

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError unless it does."""
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not self.least <= value <= self.most
            or not self.above < value
        ):
            closed = self.least > self.above
            low = f"from {self.least:g} to" if closed else f"above {self.above:g} and at most"
            raise ValueError(f"{name} must be a number {low} {self.most:g}, got {shown(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")


def check_text(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shown(value)}")


def shown(value: Any) -> str:
    """A foreign value as text for a message: short and without control characters."""
    return _SHORT.repr(value)


def printable(text: object, most: int = 300) -> str:
    """A foreign name or message as text for a message: at most `most` characters, without quotes.

    Characters that do not print are escaped as in a Python string, because terminals obey them.
    """
    whole = str(text)
    kept = whole[:most]
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in kept)
    return safe if kept == whole else f"{safe}…"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxdict = 4
_SHORT.maxlevel = 3
