"""The pictures of `specjax plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import planning
from specjax.commands.files import pyplot, save_picture

_FIGURES_LENGTH = 4  # N of ML-SpecQD's figures
_TIMES_FASTER = (4, 20, 100)  # S of its figure 2; figure 3 has the first and the last


def draw_memory(found: planning.Memory, device: int | None, path: Path) -> None:
    """One bar of parts, and the device's size as a line."""
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(7, 2), layout="constrained")
    begin = 0.0
    for name, count in dataclasses.asdict(found).items():
        axes.barh([0], [count / 1e9], left=begin, label=name.replace("_", " "))
        begin += count / 1e9
    if device is not None:
        axes.axvline(device / 1e9, color="black", linestyle="--", label="device")
    axes.set(xlabel="GB", yticks=[])
    axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, 1.4))
    _save(plot, figure, path)


def draw_speed(
    levels: Sequence[planning.Level], draft_cost: float, rows: list[dict[str, Any]], path: Path
) -> None:
    """Speed-up against the draft length, and ML-SpecQD's figures 2 and 3."""
    plot = pyplot()
    figure, (lengths, one, two) = plot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    lengths.plot([r["draft length"] for r in rows], [r["speed-up"] for r in rows], marker="o")
    shown = ", ".join(f"{level.acceptance:.2f}" for level in levels)
    title = f"acceptance {shown}, draft cost {draft_cost:.3f}"
    lengths.set(xlabel="draft length", ylabel="speed-up", title=title)
    shares = np.linspace(0, 1, 41)
    for faster in _TIMES_FASTER:
        speeds = [planning.ml_specqd_speedup([a], [_FIGURES_LENGTH], [faster]) for a in shares]
        one.plot(shares, speeds, label=f"draft {faster} times faster")
    one.set(xlabel="share of drafts accepted", ylabel="speed-up", title="one level, 4 drafts")
    one.legend(fontsize=8)
    _draw_two_levels(two, shares, figure)
    for axes in (lengths, one):
        axes.axhline(1, color="0.6", linewidth=1)
        axes.grid(alpha=0.3)
    _save(plot, figure, path)


def _draw_two_levels(axes: Any, shares: np.ndarray, figure: Any) -> None:
    """Contours over the shares of both levels' drafts."""
    faster = (_TIMES_FASTER[0], _TIMES_FASTER[-1])
    lengths = (_FIGURES_LENGTH, _FIGURES_LENGTH)
    speeds = [
        [planning.ml_specqd_speedup((upper, lower), lengths, faster) for lower in shares]
        for upper in shares
    ]
    filled = axes.contourf(shares, shares, speeds, levels=12)
    figure.colorbar(filled, label="speed-up")
    axes.set(
        xlabel=f"share accepted of the last drafts ({faster[1]} times faster)",
        ylabel=f"of the first ({faster[0]} times faster)",
        title="two levels, 4 drafts each",
    )


def draw_layers(found: Sequence[planning.LayerSet], path: Path) -> None:
    """Acceptance and promised speed-up against the number of layers."""
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(6.5, 3.6), layout="constrained")
    ordered = sorted(found, key=lambda each: len(each.layers))
    counts = [len(each.layers) for each in ordered]
    axes.plot(counts, [each.acceptance for each in ordered], marker="o", label="acceptance")
    axes.plot(counts, [each.cost for each in ordered], marker="o", label="cost of a pass")
    axes.plot(counts, [each.speedup for each in ordered], marker="o", label="speed-up")
    axes.set(xlabel="layers that draft")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(plot, figure, path)


def _save(plot: Any, figure: Any, path: Path) -> None:
    save_picture(figure, path, dpi=110)
    plot.close(figure)
