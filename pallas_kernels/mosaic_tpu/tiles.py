"""The tiles of the TPU matrix kernel, computed from bytes and not measured on a TPU.

A grid step reads a tile of outputs with all of their inputs. x stays in VMEM while the weight
streams past, and every sum over K ends in the step where it began.

- A step's copy must hide the step's overhead (some 150 cycles, 0.1 µs). Nothing hides the first
  copy, which must be small compared to the weight. With s of B bytes per step,
  (B / s) · 0.1 µs + s / bandwidth is least at s = √(B · 0.1 µs · bandwidth): 0.8 to 1.1 MiB for
  8 MiB on TPUs of 0.8 to 1.6 TB/s. This sets STEP_BYTES and, for smaller weights, MIN_STEPS.
- In the compiler's schedule, tiles of 256 outputs cost a fifth more than 512, and 128 twice as
  much, because less work overlaps with the matrix unit. Tiles are 512 wide, 256 where the steps
  suit better, and 128 where nothing else fits.
- A step unpacks its weights once for all rows of the tile. At 256 rows the products dominate.
  X_BYTES limits x and its scales, so that they fit a kernel's 16 MiB of VMEM beside two steps'
  weights, results and products.

Tiles do not change results. `quantized_matmul` describes the summation order.
"""

from __future__ import annotations

import dataclasses

LANES = 128
COLUMNS = (512, 256)
STEP_BYTES = 2**20
MIN_STEPS = 8
MOST_STEP_BYTES = 3 * 2**20
MAX_ROWS = 256
MAX_PRODUCT_ROWS = 512  # rows times groups per plane
X_BYTES = 5 * 2**20


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: rows of x per step; count: tiles of rows; columns: outputs per step."""

    rows: int
    count: int
    columns: int


def choose(
    m: int, n: int, *, weight_bytes: int, row_bytes: int, packing: int, groups_per_plane: int
) -> Tiles:
    """Chooses the tiles for M rows and N outputs.

    Args:
      weight_bytes: stored bytes per output.
      row_bytes: bytes per row of x and its scales in VMEM.
      packing: rows in a register of x: 16 for bfloat16, 32 for int8.
      groups_per_plane: groups in 128 inputs, at least 1.
    """
    most = min(MAX_ROWS, MAX_PRODUCT_ROWS // groups_per_plane)
    if m > min(most, X_BYTES // row_bytes):  # several tiles: VMEM holds the next one too
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
