"""A progress bar in the terminal, told how much is done and how much there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(
    unit: str = "it", *, name: str | None = None, leave: bool = False, disable: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that shows progress: it takes what is done and what there is in all.

    Args:
      unit: the name of one step.
      name: a label before the bar.
      leave: keep the bar in the terminal once it is full.
      disable: show nothing.
    """
    with tqdm(desc=name, unit=unit, leave=leave, disable=disable) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
