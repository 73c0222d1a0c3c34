"""The pages of docs/measurements: one per subject, a section per benchmark, a table per result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from benchmarks.support.results import Result, load_all
from benchmarks.support.sections import HEADINGS, PAGES, Page, Section
from benchmarks.support.tables import table

INDEX = """# Measurements

`python -m benchmarks.report` makes these pages from `benchmarks/results/<machine>/*.json`. It also
prints how many commits each result is behind the code. Each table names its machine, its files and
the commits that were measured. The files hold more digits, and often more rows.

{subjects}

## Machines

{machines}

The machines are rented and shared: rates drift within minutes. Compare numbers of one run only, as
the tables do. `compilers` holds programs that were compiled for other devices.

SmolLM2-135M-Instruct is a real instruct model, and its tables come first. `tiny` and the models
made from it are smaller. Their greedy text repeats itself, and repetition is easy to draft:
acceptance in their tables is higher than on real models.
"""


def pages() -> dict[str, str]:
    """The text of every page, by its path under docs/."""
    results = load_all()
    made = {f"measurements/{name}.md": _page(page, results) for name, page in PAGES.items()}
    return {"measurements/index.md": _index(results)} | made


def _index(results: Sequence[Result]) -> str:
    subjects = [
        {"page": f"[{page.title}]({name}.md)", "shows": page.shows} for name, page in PAGES.items()
    ]
    machines = dict.fromkeys((r.machine, _processor(r)) for r in results)
    lines = [{"folder": f"`{machine}`", "processor": processor} for machine, processor in machines]
    return INDEX.format(
        subjects=table(subjects, ("page", "shows")),
        machines=table(lines, ("folder", "processor")),
    )


def _page(page: Page, results: Sequence[Result]) -> str:
    parts = [f"# Measurements: {page.title}", page.shows]
    for section in page.sections:
        parts += _section(section, results)
    return "\n\n".join(parts) + "\n"


def _section(section: Section, results: Sequence[Result]) -> Iterator[str]:
    mine = [r for r in results if fnmatch(r.file, section.files)]
    if not mine:
        return
    mine.sort(key=lambda result: "smollm2" not in result.file)  # the real model leads
    yield f"## {section.title}"
    yield f"`python -m benchmarks.{section.module}`. {section.note}".strip()
    for machine in dict.fromkeys(r.machine for r in mine):
        chosen = [r for r in mine if r.machine == machine]
        for group in [[r] for r in chosen] if section.apart else [chosen]:
            yield _heading(group[0], alone=len(group) == len(chosen))
            yield _source(group)
            yield section.render([row for r in group for row in r.rows])


def _heading(result: Result, *, alone: bool) -> str:
    """The machine, and what sets a result apart from others of the same benchmark."""
    named = HEADINGS.get(result.file, "" if alone else f"`{result.file}`")
    return f"### {named}{': ' if named else ''}{_processor(result)}"


def _processor(result: Result) -> str:
    if result.environment["device"] != "cpu":
        return str(result.environment["device"])
    return f"{result.environment['processor']}, {result.environment['cores']} cores"


def _source(results: Sequence[Result]) -> str:
    files = ", ".join(f"`{r.name}.json` ({_made(r)})" for r in results)
    versions = dict.fromkeys(
        f"Python {r.environment['python']}, jax {r.environment['jax']}" for r in results
    )
    return f"{files}; {'; '.join(versions)}."


def _made(result: Result) -> str:
    return result.commit if result.command is None else f"{result.commit}, `{result.command}`"
