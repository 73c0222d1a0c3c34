"""`Auto` weighs drafts by what passes cost. `calibration` measures that."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

WIDTHS = (0, 1, 3, 7)  # drafts per pass, as wide as verification makes its passes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of passes over a batch, in plain passes of the target.

    passes: f32[4], over 0, 1, 3 and 7 drafts per row; the first is 1.
    draft: f32[], a pass of the model's cheap reading over one token per row.
    look: f32[], what a round of `Auto` takes over a plain one where it drafts nothing.
    loops: whether a look takes so long that `decode` makes rounds of rest in a loop of their own,
        which is compiled, too. Static.
    least: drafts per row that cost a pass hardly anything, so that none need be narrower. Static.
    """

    passes: jax.Array | np.ndarray
    draft: jax.Array | np.float32
    look: jax.Array | np.float32 = dataclasses.field(default_factory=np.float32)
    loops: bool = jax.tree.static(default=False)
    least: int = jax.tree.static(default=0)

    def for_more(self, times: float, wide: Costs, rows: float) -> Costs:
        """The costs for `rows` times as many rows as these are for, from those for `times` as many.

        A pass takes about as long as another one over as many tokens. times: at most 8, so that
        both have seen passes that are alike.
        """
        tokens = np.array(WIDTHS) + 1
        known = np.concatenate((tokens, times * tokens))
        seconds = np.interp(times, tokens, self.passes) * np.asarray(wide.passes)
        seconds = np.concatenate((self.passes, seconds))
        order = np.argsort(known, kind="stable")
        passes = np.interp(rows * tokens, known[order], seconds[order])
        draft = np.interp(rows, (1, times), (self.draft, wide.draft))
        look = np.interp(rows, (1, times), (self.look, wide.look))
        passes = (passes / passes[0]).astype(np.float32)
        least = min(self.least, wide.least)
        return Costs(passes, np.float32(draft), np.float32(look), least=least)

    @classmethod
    def usual(cls, rows: int) -> Costs:
        """Costs where none were measured: a pass takes 5 % longer for every token that one row
        adds, until it takes as long as a pass per token."""
        share = min(1.0, 0.05 * rows)
        passes = np.array([1 + width * share for width in WIDTHS], np.float32)
        return cls(passes, np.float32(1.0), np.float32(0.01))
