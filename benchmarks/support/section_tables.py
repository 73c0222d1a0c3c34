"""The tables of results that take more than one line per row of a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.support.compact import compact
from benchmarks.support.results import Rows, figure, plain


def _picture(name: str) -> str:
    return f"![{name.replace('-', ' ')}](../pictures/{name}.png)"


def outputs(rows: Rows) -> str:
    """How many outputs are identical; acceptance of the largest batch."""
    compared = sum(row["prompts"] for row in rows)
    identical = sum(row["identical"] for row in rows)
    qspec = [row for row in rows if "drafter" not in row]
    parts = [
        f"{compared} outputs compared with plain decoding's, **{identical} identical**.",
        "#### QSpec on `tiny`, batch 8",
        _picture("acceptance-tiny"),
        "Probability that a draft is kept given that those before it were, and (in brackets) the "
        "share of all drafts that are kept. *apart*: the verification does not overwrite the "
        "draft's cache entries.",
        _acceptance(
            largest_batch(qspec),
            lambda row: {
                "text": row["kind"],
                "draft": row["activation"],
                "cache": "overwritten" if row["overwrite"] else "apart",
            },
            "draft_length",
        ),
        "#### Drafts from models on `tiny-16bit`, batch 8",
        _acceptance(
            largest_batch([row for row in rows if "drafter" in row]),
            lambda row: {"drafter": row["drafter"], "draft length": row["draft_length"]},
            "kind",
        ),
    ]
    return "\n\n".join(parts)


def largest_batch(rows: Rows) -> Rows:
    """The rows of the largest batch, by draft length."""
    largest = max(row["batch"] for row in rows)
    return sorted((r for r in rows if r["batch"] == largest), key=lambda row: row["draft_length"])


def _acceptance(rows: Rows, head: Callable[[dict[str, Any]], dict[str, Any]], across: str) -> str:
    """One line per `head`, one column per value of `across`."""
    if across == "kind":  # in the order of the drafters' table, not of their lengths
        rows = sorted(rows, key=lambda row: row["drafter"])
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(tuple(head(row).values()), head(row))
        shown = f"{row['token_acceptance']:.3f} ({row['acceptance_rate']:.2f})"
        line[str(row[across])] = shown
    return plain(list(lines.values()))


def by_drafter(rows: Rows) -> str:
    """Means over all kinds of text, what loses first."""
    return _of_all_kinds(rows, ("batch", "temperature", "speedup"))


def by_tokens(rows: Rows) -> str:
    """Means over all kinds of text, the fewest tokens per round first."""
    return _of_all_kinds(rows, ("temperature", "tokens_per_round"))


def _of_all_kinds(rows: Rows, order: tuple[str, ...]) -> str:
    chosen = [row for row in rows if row["kind"] == "all"]
    chosen.sort(key=lambda row: [row[name] for name in order])
    return compact([{name: row[name] for name in row if name != "kind"} for row in chosen])


def papers(rows: Rows) -> str:
    """Bytes are shown in megabytes."""
    return compact(
        [
            {"MB" if name == "bytes" else name: row[name] / 1e6 if name == "bytes" else row[name]
             for name in row}
            for row in rows
        ]
    )  # fmt: skip


def by_part(rows: Rows, shown: Callable[[Rows], str] = plain) -> str:
    """One table per part."""
    parts = dict.fromkeys(row["part"] for row in rows)
    return "\n\n".join(
        f"#### {part.capitalize()}\n\n{shown([row for row in rows if row['part'] == part])}"
        for part in parts
    )


compact_by_part = partial(by_part, shown=compact)


def compression(rows: Rows) -> str:
    """Tables by part. One prompt at a time gives the same texts, and so the same counts."""
    compared = sum(row.get("compared", 0) for row in rows)
    differing = sum(row.get("differing", 0) for row in rows)
    rows = [row for row in rows if row.get("batch") != 1]
    return (
        f"{compared} greedy outputs compared with plain decoding's, **{differing} differ**.\n\n"
        f"{_picture('tokens-by-step')}\n\n{_picture('acceptance-by-source')}\n\n{by_part(rows)}"
    )


SHOWN = {
    "tokens_per_round": ("Tokens per round", 2),
    "kept": ("Kept of all drafts", 3),
    "token_acceptance": ("Kept of tested drafts", 3),
}


def accepted(rows: Rows) -> str:
    """A table per ratio and temperature: a line per drafter, a column per kind of text."""
    greedy = [row for row in rows if row["kind"] == "all" and "identical" in row]
    compared = sum(row["prompts"] for row in greedy)
    differing = compared - sum(row["identical"] for row in greedy)
    parts = [f"{compared} greedy outputs compared with plain decoding's, **{differing} differ**."]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        how = f"at temperature {temperature}" if temperature else "greedy"
        for field, (title, digits) in SHOWN.items():
            lines: dict[str, dict[str, Any]] = {}
            for row in (row for row in rows if row["temperature"] == temperature):
                line = lines.setdefault(
                    row["drafter"], {"target": row["target"], "drafter": row["drafter"]}
                )
                low, middle, high = (
                    figure(row[name], digits) for name in (f"{field}_low", field, f"{field}_high")
                )
                line[row["kind"]] = f"{middle} ({low} – {high})"
            parts += [f"#### {title}, {how}", plain(list(lines.values()))]
    return "\n\n".join(parts)


def products(rows: Rows) -> str:
    """Medians over the shapes of weights; the JSON has every shape."""
    lines = []
    for kernel, m in dict.fromkeys((row["kernel"], row["m"]) for row in rows):
        chosen = [row for row in rows if (row["kernel"], row["m"]) == (kernel, m)]
        line = {"kernel": kernel, "rows": m, "shapes": len(chosen)}
        line["share of the limit"] = figure(100 * median(r["fraction"] for r in chosen), 0, " %")
        line["least"] = figure(100 * min(r["fraction"] for r in chosen), 0, " %")
        for peer in ("xla", "torch_bf16", "torch_int4pack"):
            times = [r[f"{peer}_seconds"] / r["seconds"] for r in chosen if f"{peer}_seconds" in r]
            if times:
                line[f"{peer} takes".replace("_", " ")] = figure(median(times), 1, "×")
        lines.append(line)
    rates = [row["rate_read"] / 1e9 for row in rows]
    return f"Read bandwidth: {min(rates):.0f} to {max(rates):.0f} GB/s.\n\n{plain(lines)}"


def compiled(rows: Rows) -> str:
    """Kernels by chip and format."""
    lines = []
    for chip, form in dict.fromkeys((row["chip"], row["format"]) for row in rows):
        chosen = [row for row in rows if (row["chip"], row["format"]) == (chip, form)]
        errors = sum(bool(row["error"]) for row in chosen)
        vmem = max(row["vmem_kib"] for row in chosen)
        lines.append({"chip": chip, "format": form, "programs": len(chosen),
                      "errors": errors, "most vmem KiB": vmem})  # fmt: skip
    return plain(lines)


def compiled_for_gpus(rows: Rows) -> str:
    """Kernels by name, without their sizes."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        chosen = [row for row in rows if row["kernel"] == kernel]
        lines.append({
            "kernel": kernel, "programs": len(chosen),
            "most registers": max(row["registers"] for row in chosen),
            "spilled bytes": sum(row["spill_bytes"] for row in chosen),
            "most shared KiB": max(row["shared_bytes"] for row in chosen) / 1024,
        })  # fmt: skip
    return plain(lines)


def parallel(rows: Rows) -> str:
    meshes = [row for row in rows if "equal" in row]
    moved = [row for row in rows if "equal" not in row]
    return f"{plain(meshes)}\n\nCollectives of one round:\n\n{plain(moved)}"
