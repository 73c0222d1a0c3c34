"""The pictures of the documentation, from the same results as its tables (needs matplotlib)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.support.results import RESULTS, Rows, load, select
from benchmarks.support.section_tables import largest_batch


def draw(folder: Path) -> None:
    """Every picture, into `folder`."""
    plt.rcParams.update({"legend.fontsize": 8, "axes.grid": True, "grid.alpha": 0.3})
    greedy = load("epyc/compression_greedy").rows
    _instruct(folder / "instruct.png")
    _where_it_pays(folder / "where-it-pays.png")
    _acceptance(load("epyc/outputs_tiny_8").rows, folder / "acceptance-tiny.png")
    _steps([row for row in greedy if "by_step" in row], folder / "tokens-by-step.png")
    sources = [r for name in ("compression", "compression_greedy", "compression_choices")
               for r in load(f"epyc/{name}").rows if r["part"] == "sources"]  # fmt: skip
    _sources(sources, folder / "acceptance-by-source.png")
    _losses(folder / "tiny-loss.png")


def _figure(height: float = 3.6) -> tuple[Any, Any]:
    return plt.subplots(figsize=(6.5, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    # No version of matplotlib in the file: the same results make the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _instruct(path: Path) -> None:
    """SmolLM2's speed-up over plain decoding on real prompts, with intervals."""
    from benchmarks.support.quotes import INSTRUCT, INSTRUCT_RESULTS, instruct

    lines = instruct()
    figure, axes = _figure(0.9 + 0.6 * len(lines))
    heights, colors = (-0.3, -0.1, 0.1, 0.3), ("#3b6ea8", "#9db9d8", "#c98b3c", "#e6c79f")
    for height, name, color in zip(heights, INSTRUCT, colors, strict=True):
        rows = [(place + height, line[name]) for place, line in enumerate(lines) if line[name]]
        values = [row["speedup"] for _, row in rows]
        spread = [
            [abs(row[f"speedup_{end}"] - row["speedup"]) for _, row in rows]
            for end in ("low", "high")
        ]
        places = [place for place, _ in rows]
        axes.barh(places, values, 0.19, xerr=spread, color=color, label=name, ecolor="0.3")
    axes.axvline(1, color="0.2", linewidth=1, zorder=0)
    names = [f"{line['drafter']}\n{line['model']}" for line in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper right")
    environment = load(INSTRUCT_RESULTS[0]).environment
    axes.set_xlabel(
        "speed-up over plain decoding of the same model (the line)\nSmolLM2-135M-Instruct, "
        f"real prompts, {environment['cores']} cores of an {environment['processor']}", fontsize=8,
    )  # fmt: skip
    _save(figure, path)


def _where_it_pays(path: Path) -> None:
    """SmolLM2's speed-up by its own drafts, measured and predicted, by draft length and batch."""
    figure, panels = plt.subplots(1, 2, figsize=(6.5, 3.2), sharey=True, layout="constrained")
    for axes, (target, name) in zip(
        panels, (("nested16", "nested"), ("gguf", "4 bits")), strict=True
    ):
        rows = load(f"epyc/smollm2_planner_{target}").rows
        for batch in dict.fromkeys(row["batch"] for row in rows):
            chosen = select(rows, batch=batch)
            lengths = [row["draft_length"] for row in chosen]
            (line,) = axes.plot(lengths, [row["predicted"] for row in chosen], "--")
            measured = [row["measured"] for row in chosen]
            axes.plot(lengths, measured, "o", color=line.get_color(), label=f"batch {batch}")
        axes.axhline(1, color="0.2", linewidth=1, zorder=0)
        axes.set(xlabel="draft length", title=name)
    panels[0].set(ylabel="speed-up over its plain decoding", ylim=(0, None))
    panels[1].legend(loc="lower left", title="dots measured, lines predicted", title_fontsize=8)
    _save(figure, path)


def _acceptance(rows: Rows, path: Path) -> None:
    """Share of drafts kept against draft length, one line per kind and activation."""
    rows = [row for row in largest_batch(rows) if row["overwrite"]]
    figure, axes = _figure()
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for activation, style in (("a8", "-"), ("a4", "--")):
            chosen = select(rows, kind=kind, activation=activation)
            lengths = [row["draft_length"] for row in chosen]
            kept = [row["acceptance_rate"] for row in chosen]
            axes.plot(lengths, kept, style, marker="o", markersize=3, label=f"{kind}, {activation}")
    axes.set(xlabel="draft length", ylabel="drafts accepted", ylim=(0, 1.02))
    axes.legend(ncols=2)
    _save(figure, path)


def _steps(rows: Rows, path: Path) -> None:
    """Tokens of all prompts together against verifications; the ablations are left out."""
    figure, axes = _figure()
    for row in rows:
        if "," not in row["drafter"]:
            axes.plot(row["by_step"], label=row["drafter"])
    axes.set(xlabel="verifications", ylabel="tokens, all prompts")
    axes.legend()
    _save(figure, path)


def _sources(rows: Rows, path: Path) -> None:
    """The share of guessed tokens that came, by source and decoding."""
    figure, axes = _figure(3.0)
    sources = list(dict.fromkeys(row["source"] for row in rows))
    for number, decoding in enumerate(("greedy", "sampled")):
        chosen = select(rows, decoding=decoding)
        places = [sources.index(row["source"]) + 0.4 * number for row in chosen]
        axes.bar(places, [row["acceptance_rate"] for row in chosen], width=0.4, label=decoding)
    axes.set_xticks([place + 0.2 for place in range(len(sources))], sources)
    axes.set(ylabel="guessed tokens accepted")
    axes.legend()
    _save(figure, path)


def _losses(path: Path) -> None:
    """Training and held-out loss against tokens, from the log of `checkpoints_tools.train_tiny`."""
    log = (RESULTS / "tiny_training.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in log]
    figure, axes = _figure()
    train = [record for record in records if "loss" in record]
    millions = [record["tokens"] / 1e6 for record in train]
    axes.plot(millions, [record["loss"] for record in train], color="0.6", label="training")
    held_out = [record for record in records if "validation" in record]
    millions = [record["tokens"] / 1e6 for record in held_out]
    for kind in held_out[-1]["validation"]:
        losses = [record["validation"][kind] for record in held_out]
        axes.plot(millions, losses, marker="o", markersize=3, label=kind)
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1.5, 6))
    axes.legend()
    _save(figure, path)
