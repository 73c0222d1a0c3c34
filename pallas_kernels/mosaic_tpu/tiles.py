"""The tiles of the TPU kernel, by arithmetic of bytes: no TPU was at hand to measure them.

A step of the grid reads a tile of outputs with all of their inputs: x stays where it is while the
weight streams past, and the sum over K is finished where it began.

- A step's copy must hide what a step costs (some 150 cycles, 0.1 µs), and the first copy, which
  nothing hides, must stay small beside the whole weight. With s bytes per step of B in all,
  (B / s) · 0.1 µs + s / bandwidth is least at s = √(B · 0.1 µs · bandwidth): 0.8 to 1.1 MiB for
  8 MiB on TPUs of 0.8 to 1.6 TB/s. Hence STEP_BYTES and, for smaller weights, MIN_STEPS.
- By the compiler's schedule 256 outputs at a time cost a fifth more than 512 and 128 twice as much:
  there is too little to do while the matrix unit works. So 512, 256 where that makes better steps,
  128 where nothing else fits.
- A step unpacks its weights once for all rows of the tile. At 256 rows the products are most of the
  work. X_BYTES keeps x and its scales so small that with two steps' weights, results and products
  they fit the 16 MiB that a kernel may use of a TPU's VMEM.

Nothing here changes a result: see `quantized_matmul` on the order of summation.
"""

from __future__ import annotations

import dataclasses

LANES = 128
COLUMNS = (512, 256)
STEP_BYTES = 2**20
MIN_STEPS = 8
MOST_STEP_BYTES = 3 * 2**20
MAX_ROWS = 256
MAX_PRODUCT_ROWS = 512  # rows times the groups of a plane
X_BYTES = 5 * 2**20


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: of x that a step multiplies, in `count` tiles; columns: outputs of a step."""

    rows: int
    count: int
    columns: int


def choose(
    m: int, n: int, *, weight_bytes: int, row_bytes: int, packing: int, groups_per_plane: int
) -> Tiles:
    """The tiles for M rows and N outputs.

    Args:
      weight_bytes: stored bytes of one output.
      row_bytes: bytes of one row of x with its scales, as they lie in VMEM.
      packing: rows in a register of x: 16 of bfloat16, 32 of int8.
      groups_per_plane: groups in 128 inputs, 1 at least.
    """
    most = min(MAX_ROWS, MAX_PRODUCT_ROWS // groups_per_plane)
    if m > min(most, X_BYTES // row_bytes):  # x moves, so the next tile is copied beside this one
        most = min(most, X_BYTES // (2 * row_bytes))
    most = max(most // packing, 1) * packing
    count = -(-m // most)
    rows = -(-m // (count * packing)) * packing
    return Tiles(rows, count, _columns(n, weight_bytes))


def _columns(n: int, weight_bytes: int) -> int:
    large, small = COLUMNS
    if large * weight_bytes <= STEP_BYTES and n >= large * MIN_STEPS:
        return large
    return small if small * weight_bytes <= MOST_STEP_BYTES else LANES
