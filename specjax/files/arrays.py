"""Reads foreign arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.checks import printable


def read_array(file: Path, dtype: type[np.generic], axes: int) -> np.ndarray:
    """The array in a .npy file, with at least one entry.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is damaged, or the array has another dtype or number of axes.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {file.name}")
    try:  # as a map, because a header may claim more than the file has and memory can hold
        array = np.array(np.lib.format.open_memmap(file, mode="r"))
    except Exception as error:  # a damaged header leads to many kinds
        raise ValueError(f"{file} is truncated or damaged: {printable(error)}") from error
    if array.dtype != dtype or array.ndim != axes or array.size == 0:
        accepted = f"{np.dtype(dtype)}[{', '.join(['any'] * axes)}]"
        raise ValueError(f"{file} must hold {accepted}, got {array.dtype}{list(array.shape)}")
    return array
