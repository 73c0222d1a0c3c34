"""Computes the speed-up of speculation from the acceptance of drafts and the cost of passes.

All costs are in units of one plain pass of the target. With α the probability that a draft is kept
given that those before it were, a round of N drafts gains 1 + α + … + αᴺ tokens (the article, "The
Acceptance-Rejection Mechanism"; Leviathan et al. 2023, equation 1) and takes N drafting passes and
one verifying pass.

With several levels, a level's drafts are made in rounds of their own until there are enough.
ML-SpecQD (section III-C) puts the speed of these rounds into its equation 1, which assumes full
rounds (`ml_specqd_speedup`). `speedup` counts the rounds that a draft of a given length really
needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from operator import itemgetter

from specjax.checks import check_integer

LONGEST = 12  # drafts per round that are looked at unless told otherwise
MOST = 256  # and when told otherwise


@dataclasses.dataclass(frozen=True)
class Level:
    """A model that verifies, with the acceptance of its drafts.

    acceptance: α, the probability that a draft is kept given that those before it were, in 0 … 1.
    draft_length: N, drafts per round.
    pass_cost: the model's pass over one token; 1 for the target, or more if a verifying pass costs
        a fixed share more than a plain one (the article's verify_overhead).
    row_cost: the cost that every draft adds to the verifying pass.
    measured: costs of verifying 0, 1, 2 … drafts, used instead of pass_cost + n · row_cost.

    Raises ValueError where a field is out of its range.
    """

    acceptance: float
    draft_length: int = 5
    pass_cost: float = 1.0
    row_cost: float = 0.0
    measured: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_share("acceptance", self.acceptance)
        check_length(self.draft_length)
        check_cost("row_cost", self.row_cost)
        for cost in (self.pass_cost, *self.measured):
            if check_cost("pass_cost", cost) == 0:
                raise ValueError("pass_cost must be more than 0, got 0")

    def verification(self, drafts: int) -> float:
        """Returns the cost of the pass that verifies so many drafts."""
        if drafts < len(self.measured):
            return self.measured[drafts]
        return self.pass_cost + drafts * self.row_cost


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """Returns the tokens gained per round, 1 + α + … + αᴺ = (1 - αᴺ⁺¹) / (1 - α).

    This is the article's "E[accepted]", which counts the token that the target adds. Raises
    ValueError if an argument is out of its range.
    """
    check_share("acceptance", acceptance)
    return sum(acceptance**n for n in range(check_length(draft_length) + 1))


def accepted_share(acceptance: float, draft_length: int) -> float:
    """Returns the share of all drafts that is kept: ML-SpecQD's α = G / N (section III-B)."""
    return (expected_tokens(acceptance, draft_length) - 1) / draft_length


def expected_rounds(tokens: int, acceptance: float, draft_length: int) -> float:
    """Returns the expected rounds until there are `tokens` tokens; the last round may be cut off.

    R(n) = 1 + Σₖ P(k) · R(n - k - 1), and 0 for n ≤ 0, where P(k) is the chance that a round keeps
    k = 0 … N drafts: (1 - α) · αᵏ, and αᴺ for k = N.
    """
    check_share("acceptance", acceptance)
    check_length(draft_length)
    return _rounds(tokens, acceptance, draft_length)[tokens]


def _rounds(tokens: int, acceptance: float, draft_length: int) -> list[float]:
    """`expected_rounds` until there are 0, 1, … `tokens` tokens."""
    gains = [(1 - acceptance) * acceptance**k for k in range(draft_length)]
    gains.append(acceptance**draft_length)
    rounds: list[float] = [0.0]
    for n in range(1, tokens + 1):
        rounds.append(1 + sum(p * rounds[n - k - 1] for k, p in enumerate(gains[:n])))
    return rounds


def speedup(levels: Level | Sequence[Level], draft_cost: float, tokens: int | None = None) -> float:
    """Returns the speed-up over plain decoding (the article, "Speedup model").

    Args:
      levels: the target first. If its draft model is drafted for in turn, that model comes next,
        with its own pass_cost and row_cost.
      draft_cost: one drafting pass of the last drafter (ML-SpecQD's 1 / S).
      tokens: length of a text, whose last round may make more than needed; None: an endless text.

    Returns:
      The speed-up. Below 1 drafting does not pay.

    Raises:
      ValueError: `levels` is empty, a cost is negative or not a number, or `tokens` is less than 1.
    """
    target, *inner = _as_levels(levels)
    check_cost("draft_cost", draft_cost)
    n = target.draft_length
    cost = draft_time(n, inner, draft_cost) + target.verification(n)
    if tokens is None:
        return expected_tokens(target.acceptance, n) / cost
    rounds = expected_rounds(check_length(tokens, "tokens"), target.acceptance, n)
    return tokens / (rounds * cost)


def draft_time(tokens: int, levels: Sequence[Level], draft_cost: float) -> float:
    """Returns the cost of a draft of so many tokens, made by the first of `levels` or by plain
    passes.

    Every round of a level drafts its whole length and is verified in one pass.
    """
    if not levels:
        return tokens * draft_cost
    level, *inner = levels
    n = level.draft_length
    rounds = expected_rounds(tokens, level.acceptance, n)
    return rounds * (draft_time(n, inner, draft_cost) + level.verification(n))


def best_draft_lengths(
    levels: Level | Sequence[Level], draft_cost: float, longest: int = LONGEST
) -> tuple[Level, ...]:
    """Chooses the draft lengths with the largest speed-up (the article, "Optimal k Selection").

    Args:
      levels, draft_cost: as for `speedup`; the levels' own draft lengths do not matter.
      longest: the longest draft to try, for each level.

    Returns:
      The levels. Their `speedup` may still be below 1.

    Raises:
      ValueError: as `speedup` does.
    """
    target, *inner = _as_levels(levels)
    lengths = range(1, check_longest(longest) + 1)
    tried = (
        (dataclasses.replace(target, draft_length=n), *below)
        for n, below in zip(
            lengths, fastest_for_each(lengths, inner, draft_cost, longest), strict=True
        )
    )
    return max(tried, key=lambda each: speedup(each, draft_cost))


def fastest_drafts(
    tokens: int, levels: Sequence[Level], draft_cost: float, longest: int = LONGEST
) -> tuple[Level, ...]:
    """Chooses the draft lengths with the smallest `draft_time` for so many tokens."""
    return _fastest([tokens], levels, draft_cost, check_longest(longest))[0][1]


def fastest_for_each(
    counts: Sequence[int], levels: Sequence[Level], draft_cost: float, longest: int = LONGEST
) -> list[tuple[Level, ...]]:
    """`fastest_drafts` for each of several numbers of tokens, in about the time of one."""
    return [below for _, below in _fastest(counts, levels, draft_cost, check_longest(longest))]


def _fastest(
    counts: Sequence[int], levels: Sequence[Level], draft_cost: float, longest: int
) -> list[tuple[float, tuple[Level, ...]]]:
    """For each number of tokens, the smallest `draft_time`, and the levels that have it.

    The best lengths below a level depend on its own length alone, so each is looked for once.
    """
    if not levels:
        return [(tokens * draft_cost, ()) for tokens in counts]
    first, *inner = levels
    lengths, tried = range(1, longest + 1), []
    for n, (time, below) in zip(
        lengths, _fastest(lengths, inner, draft_cost, longest), strict=True
    ):
        level = dataclasses.replace(first, draft_length=n)
        cost, rounds = time + level.verification(n), _rounds(max(counts), level.acceptance, n)
        tried.append([(rounds[tokens] * cost, (level, *below)) for tokens in counts])
    return [min(each, key=itemgetter(0)) for each in zip(*tried, strict=True)]


def ml_specqd_speedup(
    shares: Sequence[float], draft_lengths: Sequence[int], times_faster: Sequence[float]
) -> float:
    """Computes ML-SpecQD's equation 1, (α + 1/N) / (1/N + 1/S), for any number of levels (section
    III-C).

    Figure 2 plots one level at N = 4 and S = 4, 20 and 100; figure 3 two levels at S = 4 and 100.

    Args:
      shares: the share of each level's drafts that is kept, α = G / N; the level below the target
        first.
      draft_lengths: N of each.
      times_faster: S, how many times faster than the target each drafting model is.

    Returns:
      The speed-up over plain decoding.

    Raises:
      ValueError: the arguments are of different lengths or out of their ranges.
    """
    if not len(shares) == len(draft_lengths) == len(times_faster) or not shares:
        raise ValueError(
            "shares, draft_lengths and times_faster must name as many levels each, at least one; "
            f"got {len(shares)}, {len(draft_lengths)} and {len(times_faster)}"
        )
    for faster in times_faster:
        if not 0 < faster < math.inf:
            raise ValueError(f"times_faster must be more than 0, got {faster!r}")
    models = [1.0, *times_faster]
    speed = models[-1]
    for index in reversed(range(len(shares))):
        share = check_share("a share", shares[index])
        n = check_length(draft_lengths[index])
        speed = models[index] * (share + 1 / n) / (1 / n + models[index] / speed)
    return speed


def check_share(name: str, value: float) -> float:
    """Returns `value`. Raises ValueError unless it is in 0 … 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in 0 … 1, got {value!r}")
    return value


def check_cost(name: str, value: float) -> float:
    """Returns `value`. Raises ValueError if it is negative, infinite or not a number."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be 0 or more, in passes of the target, got {value!r}")
    return value


def check_length(value: int, name: str = "draft_length") -> int:
    """Returns `value` as an int. Raises ValueError unless it is at least 1."""
    if check_integer(name, value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def check_longest(value: int) -> int:
    """Returns the longest draft to consider. Raises ValueError unless it is in 1 … MOST."""
    longest = check_length(value, "longest")
    if longest > MOST:
        raise ValueError(f"longest must be at most {MOST}, got {longest}")
    return longest


def _as_levels(levels: Level | Sequence[Level]) -> tuple[Level, ...]:
    found = (levels,) if isinstance(levels, Level) else tuple(levels)
    if not found:
        raise ValueError("levels must hold at least one Level, got none")
    return found
