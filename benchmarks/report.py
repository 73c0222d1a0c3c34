"""Makes docs/measurements/, docs/pictures/ and the tables that README and docs quote, from results.

python -m benchmarks.report

It prints how many commits each result is behind the code, and fails where a page or a quoted number
is not what the results say. `--check` changes nothing; the tests check the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.pages import pages
from benchmarks.support.quotes import refresh, unfounded
from benchmarks.support.results import age, load_all
from benchmarks.support.tables import ROOT

DOCS = ROOT / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    if not check:
        _write()
    for result in load_all():
        print(f"{result.name}: {age(result)}")
    if complaints := list(problems()):
        raise SystemExit("\n".join(complaints))


def _write() -> None:
    from benchmarks.support.pictures import draw

    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)
    for page in abandoned():
        page.unlink()
    for page in quoting_pages():
        page.write_text(refresh(page.read_text()))
    draw(DOCS / "pictures")


def abandoned() -> list[Path]:
    """Pages of docs/measurements/ that this no longer makes."""
    made = {DOCS / name for name in pages()}
    return [page for page in sorted((DOCS / "measurements").glob("*.md")) if page not in made]


def quoting_pages() -> list[Path]:
    """README and the pages that people write."""
    written = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "measurements"]
    return [ROOT / "README.md", *written]


def problems() -> Iterator[str]:
    """Every disagreement with the results, one sentence each."""
    for name, text in pages().items():
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text:
            yield f"docs/{name} is not what the results say: run python -m benchmarks.report"
    for page in abandoned():
        yield f"no result makes {page.relative_to(ROOT)}: run python -m benchmarks.report"
    for page in quoting_pages():
        text, place = page.read_text(), page.relative_to(ROOT)
        if refresh(text) != text:
            yield f"a table of {place} is not what the results say: run python -m benchmarks.report"
        for complaint in unfounded(text):
            yield f"{place}: {complaint}"


if __name__ == "__main__":
    main()
