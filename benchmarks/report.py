"""Makes the tables and the picture of docs/measurements.md from benchmarks/results/*.json.

python -m benchmarks.report
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.common import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
Rows = list[dict[str, Any]]


def main() -> None:
    parts = ["# Measurements\n\nMade by `python -m benchmarks.report` from `benchmarks/results/`."]
    for title, name, section in SECTIONS:
        files = sorted(RESULTS.glob(f"{name}*.json"))
        if files:
            parts.append(f"## {title}")
            documents = [json.loads(file.read_text()) for file in files]
            for processor in dict.fromkeys(each["environment"]["processor"] for each in documents):
                chosen = [d for d in documents if d["environment"]["processor"] == processor]
                parts += dict.fromkeys(_where(each["environment"], name) for each in chosen)
                parts.append(section([row for document in chosen for row in document["rows"]]))
    (DOCS / "measurements.md").write_text("\n\n".join(parts) + "\n")
    _loss_curve(RESULTS / "tiny_training.jsonl", DOCS / "tiny-loss.png")


def _where(environment: dict[str, Any], name: str) -> str:
    return (
        f"`python -m benchmarks.{name}` on {environment['processor']}, {environment['cores']} "
        f"cores; Python {environment['python']}, jax {environment['jax']}, commit "
        f"{environment['commit']}."
    )


def _exactness(rows: Rows) -> str:
    compared = sum(row["prompts"] for row in rows)
    identical = sum(row["identical"] for row in rows)
    parts = [f"{compared} outputs compared with plain decoding's, **{identical} identical**."]
    from_models = [row for row in rows if "drafter" in row]
    rows = [row for row in rows if "drafter" not in row]
    for model in dict.fromkeys(row["model"] for row in rows):
        chosen = _largest_batch([row for row in rows if row["model"] == model])
        _picture([row for row in chosen if row["overwrite"]], DOCS / f"acceptance-{model}.png")
        parts.append(
            f"### {model}, batch {chosen[0]['batch']}\n\n![acceptance](acceptance-{model}.png)"
        )
        parts.append(
            "Probability that a draft is kept given that those before it were, and (in brackets) "
            "the share of all drafts that are kept; *apart*: without overwriting the draft's cache "
            "entries."
        )
        parts.append(_acceptance_table(chosen))
    for model in dict.fromkeys(row["model"] for row in from_models):
        chosen = _largest_batch([row for row in from_models if row["model"] == model])
        parts.append(f"### {model}, drafts from models, batch {chosen[0]['batch']}")
        parts.append(_drafter_acceptance(chosen))
    return "\n\n".join(parts)


def _drafter_acceptance(rows: Rows) -> str:
    """One line per drafter; one column per kind of text."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = {"drafter": row["drafter"], "draft_length": row["draft_length"]}
        shown = f"{row['token_acceptance']:.3f} ({row['acceptance_rate']:.2f})"
        lines.setdefault(row["drafter"], line)[row["kind"]] = shown
    return _plain(list(lines.values()))


def _drafters(rows: Rows) -> str:
    """The drafters beside plain decoding; then draft lengths and schedules, with their picture."""
    compared = [row for row in rows if row["part"] == "drafters"]
    lengths = [row for row in rows if row["part"] == "lengths"]
    parts = [_plain(compared)] if compared else []
    if lengths:
        _length_picture(lengths, DOCS / "draft-lengths.png")
        parts.append("### Draft lengths of the MXFP4 cast\n\n![draft lengths](draft-lengths.png)")
        parts.append(_plain(lengths))
    return "\n\n".join(parts)


def _length_picture(rows: Rows, path: Path) -> None:
    """Speed-up against constant draft length; the schedules as levels across."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    constants = [row for row in rows if row["drafter"].isdigit()]
    axes.plot(
        [row["draft_length"] for row in constants], [row["speedup"] for row in constants],
        marker="o", markersize=3, label="constant",
    )  # fmt: skip
    for row, style in zip((r for r in rows if r not in constants), (":", "--", "-."), strict=False):
        axes.axhline(row["speedup"], color="0.4", linestyle=style, label=row["drafter"])
    axes.set(xlabel="draft length", ylabel="speed-up over plain decoding")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _compression(rows: Rows) -> str:
    """Tables by part; the tokens by step, and the acceptance by source, as pictures."""

    def part(name: str) -> Rows:
        hidden = ("part", "by_step")
        chosen = [row for row in rows if row["part"] == name]
        return [{key: row[key] for key in row if key not in hidden} for row in chosen]

    compared = sum(row.get("compared", 0) for row in rows)
    differing = sum(row.get("differing", 0) for row in rows)
    # One prompt at a time gives the same texts, and so the same counts.
    rows = [row for row in rows if row.get("batch") != 1]
    _step_picture([row for row in rows if "by_step" in row], DOCS / "tokens-by-step.png")
    _source_picture(part("sources"), DOCS / "acceptance-by-source.png")
    return "\n\n".join(
        (
            "Tokens per verification; *drafted*: tokens proposed per verification. "
            f"{compared} greedy outputs compared with plain decoding's, **{differing} differ**.",
            f"### Greedy\n\n![tokens by step](tokens-by-step.png)\n\n{_plain(part('greedy'))}",
            "### Sampled, temperature 1\n\n*error*: standard error of the mean, from seed to seed."
            f"\n\n{_plain(part('sampled'))}",
            "### Below a draft model\n\n*draft_passes*: passes of the drafting model per token."
            f"\n\n{_plain(part('levels'))}",
            "### By source\n\n![acceptance by source](acceptance-by-source.png)\n\nPer round of "
            f"SPECTRA; what a source guesses counts whether or not the budget had room for it.\n\n"
            f"{_plain(part('sources'))}",
            f"### Choices\n\n{_plain(part('choices'))}",
        )
    )


def _step_picture(rows: Rows, path: Path) -> None:
    """Tokens of all prompts together against verifications; the ablations are left out."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for row in rows:
        if "," not in row["drafter"]:
            axes.plot(row["by_step"], label=row["drafter"])
    axes.set(xlabel="verifications", ylabel="tokens, all prompts")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _source_picture(rows: Rows, path: Path) -> None:
    """The share of guessed tokens that came, by source and decoding."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.0), layout="constrained")
    sources = list(dict.fromkeys(row["source"] for row in rows))
    for number, decoding in enumerate(("greedy", "sampled")):
        chosen = [row for row in rows if row["decoding"] == decoding]
        places = [sources.index(row["source"]) + 0.4 * number for row in chosen]
        axes.bar(places, [row["acceptance_rate"] for row in chosen], width=0.4, label=decoding)
    axes.set_xticks([place + 0.2 for place in range(len(sources))], sources)
    axes.set(ylabel="guessed tokens accepted")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _largest_batch(rows: Rows) -> Rows:
    """The rows of the largest batch, by draft length."""
    largest = max(row["batch"] for row in rows)
    chosen = [row for row in rows if row["batch"] == largest]
    return sorted(chosen, key=lambda row: row["draft_length"])


def _acceptance_table(rows: Rows) -> str:
    """One line per kind, activation and cache; one column per draft length."""
    lines: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for row in rows:
        key = row["kind"], row["activation"], row["overwrite"]
        cache = "overwritten" if row["overwrite"] else "apart"
        line = lines.setdefault(key, {"text": key[0], "draft": key[1], "cache": cache})
        shown = f"{row['token_acceptance']:.3f} ({row['acceptance_rate']:.2f})"
        line[str(row["draft_length"])] = shown
    return _plain(list(lines.values()))


def _picture(rows: Rows, path: Path) -> None:
    """Share of drafts kept against draft length, one line per kind and activation."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for activation, style in (("a8", "-"), ("a4", "--")):
            chosen = [r for r in rows if r["kind"] == kind and r["activation"] == activation]
            if chosen:
                axes.plot(
                    [row["draft_length"] for row in chosen],
                    [row["acceptance_rate"] for row in chosen],
                    style, marker="o", markersize=3, label=f"{kind}, {activation}",
                )  # fmt: skip
    axes.set(xlabel="draft length", ylabel="drafts accepted", ylim=(0, 1.02))
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _loss_curve(log: Path, path: Path) -> None:
    """Training and held-out loss against tokens, from the log of `checkpoints_tools.train_tiny`."""
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    train = [record for record in records if "loss" in record]
    millions = [record["tokens"] / 1e6 for record in train]
    axes.plot(millions, [record["loss"] for record in train], color="0.6", label="training")
    held_out = [record for record in records if "validation" in record]
    for kind in held_out[-1]["validation"]:
        axes.plot(
            [record["tokens"] / 1e6 for record in held_out],
            [record["validation"][kind] for record in held_out],
            marker="o", markersize=3, label=kind,
        )  # fmt: skip
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1.5, 6))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plain(rows: Rows) -> str:
    """All columns that any row has, in the order in which they appear."""
    return table(rows, list(dict.fromkeys(name for row in rows for name in row)))


def _by_part(rows: Rows) -> str:
    """One table per part."""
    parts = []
    for name in dict.fromkeys(row["part"] for row in rows):
        chosen = [
            {key: row[key] for key in row if key != "part"} for row in rows if row["part"] == name
        ]
        parts.append(f"### {name.capitalize()}\n\n{_plain(chosen)}")
    return "\n\n".join(parts)


def _kernels(rows: Rows) -> str:
    """Milliseconds, and the peers' beside them."""

    def line(row: dict[str, Any]) -> dict[str, Any]:
        times = {
            key[: -len("seconds")].rstrip("_") or "ours": 1e3 * value
            for key, value in row.items()
            if key.endswith("seconds")
        }
        named = {f"{name} ms": value for name, value in times.items()}
        shape = {key: row[key] for key in ("kernel", "k", "n", "m")}
        return shape | named | {"fraction": row["fraction"], "bound": row["bound"]}

    rates = [f"{row['rate_read'] / 1e9:.0f}" for row in rows]
    return (
        f"Read bandwidth in the same run: {', '.join(dict.fromkeys(rates))} GB/s (it drifts: the "
        f"machine is shared).\n\n{_plain([line(row) for row in rows])}"
    )


SECTIONS: Sequence[tuple[str, str, Callable[[Rows], str]]] = (
    ("Exactness and acceptance", "exactness", _exactness),
    ("Memory, and time against the cache's capacity", "footprint", _plain),
    ("Speed beside plain decoding", "speed", _plain),
    ("Drafts from models, a billion parameters", "drafters", _drafters),
    ("Predicted and measured speed-up", "planner", _plain),
    ("Drafts without a model", "compression", _compression),
    ("What refinement of a corpus is worth", "refinement", _plain),
    ("What drafts without a model cost", "drafter_cost", _plain),
    ("Continuous batching", "batching", _plain),
    ("Many devices", "parallel", _plain),
    ("Choosing a token, milliseconds", "sampling", _plain),
    ("Sampled texts against their exact distribution", "chi_square", _plain),
    ("Evaluation", "evaluation", _by_part),
    ("Matrix products", "kernels", _kernels),
    ("A decode step of a billion parameters", "decode_step", _plain),
    ("Quantization schemes", "schemes", _plain),
    ("Layers unrolled or scanned", "layers", _plain),
    ("Conversion of a billion parameters", "convert_1b", _plain),
    ("Quantization of a billion parameters", "quantize_1b", _plain),
)

if __name__ == "__main__":
    main()
