"""The parameters of a kernel call that are known at trace time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import BLOCK, PLANE
from pallas_kernels.words import Decoder

MULTIPROCESSORS = 132  # on an H100 or H200
ROWS = 64  # outputs per warpgroup, the rows of a wgmma
SHARED_BYTES = 200 * 1024  # of a multiprocessor; its blocks of the grid may use up to 227 KiB
MAX_STAGES = 6
FEW_ROWS = 16  # a thread's registers hold all sums and products of up to so many rows
SUMS_STAY_ROWS = 32  # and the sum of the segments before of up to so many
BLOCKS_TOGETHER = 2  # blocks whose products are in flight together
TOGETHER_ROWS = 8  # of up to so many rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parameters of a kernel call.

    m: rows of x, padded to whole tiles.
    outputs: of every weight.
    m_tile, n_tile: rows and outputs of one work item.
    blocks: the number of blocks of 256 inputs.
    per_segment: blocks per segment. The last segment may have fewer.
    parts: work items per output tile: 1, or one per segment.
    group: inputs per product.
    decoder: converts packed words to operands.
    of_x, of_weight: names of the kernel's arguments (`kernel.call`).
    resident: blocks of the grid per multiprocessor.
    exponents: whether scales are E8M0.
    interpreted: whether the kernel runs in interpret mode.
    """

    m: int
    outputs: tuple[int, ...]
    m_tile: int
    n_tile: int
    blocks: int
    per_segment: int
    parts: int
    group: int
    decoder: Decoder
    of_x: tuple[str, ...]
    of_weight: tuple[str, ...]
    resident: int = 1
    exponents: bool = False
    interpreted: bool = False

    @property
    def n(self) -> int:
        """Outputs of all weights."""
        return sum(self.outputs)

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups that compute."""
        return self.n_tile // ROWS

    @property
    def segments(self) -> int:
        """The number of partial sums over the inputs. It does not depend on M."""
        return -(-self.blocks // self.per_segment)

    @property
    def per_part(self) -> int:
        """Segments per work item."""
        return self.segments // self.parts

    def steps(self, first: jax.Array, segments: int) -> jax.Array | int:
        """The number of input blocks in segments from `first` on. The last one may be shorter."""
        if segments == self.segments:
            return self.blocks
        if self.blocks % self.per_segment == 0:
            return segments * self.per_segment
        return jnp.minimum(segments * self.per_segment, self.blocks - first * self.per_segment)

    @property
    def items(self) -> int:
        """The number of work items. Each is a tile of y and a part of the inputs."""
        return (self.m // self.m_tile) * (self.n // self.n_tile) * self.parts

    @property
    def grid(self) -> int:
        """The number of blocks of the grid, which are all resident."""
        return min(self.items, MULTIPROCESSORS * self.resident)

    @property
    def sums_stay(self) -> bool:
        """Whether the sum of an item's segments stays in registers."""
        return self.m_tile <= SUMS_STAY_ROWS

    @property
    def groups(self) -> int:
        """Products per block."""
        return BLOCK // self.group

    @property
    def in_flight(self) -> int:
        """Products in flight: whole planes, as many as a thread's registers allow."""
        if self.m_tile <= FEW_ROWS and self.resident == 1:
            return self.groups
        return max(2, PLANE // self.group) if self.m_tile <= 64 else PLANE // self.group

    @property
    def together(self) -> int:
        """Blocks whose products are in flight together."""
        few = self.m_tile <= TOGETHER_ROWS and self.groups <= 4 and not self.zeros
        return min(BLOCKS_TOGETHER, self.per_segment) if few and self.resident == 1 else 1

    @property
    def scaled(self) -> bool:
        """Whether the kernel scales products. Otherwise it only adds them."""
        return "scales" in self.of_weight

    @property
    def zeros(self) -> bool:
        """Whether the kernel reads zeros."""
        return "zeros" in self.of_weight

    @property
    def integer(self) -> bool:
        """Whether the kernel multiplies integers."""
        return self.decoder.dtype == np.int8

    @property
    def product_dtype(self) -> np.dtype:
        """The dtype of a group's product."""
        return np.dtype(np.int32 if self.integer else np.float32)

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype of a segment's sum. Without scales it is that of the products."""
        return np.dtype(np.float32) if self.scaled else self.product_dtype

    @property
    def width(self) -> int:
        """Inputs per operand. It exceeds `group` where the instruction needs a wider operand."""
        return max(self.group, 64) if self.integer else self.group

    @property
    def swizzle(self) -> int:
        """Bytes in a swizzled row of x."""
        return min(self.width * self.decoder.dtype.itemsize, 128)

    @property
    def x_rows(self) -> int:
        """Rows per block in x_groups: scales, then sums if the weight has zeros.

        Padding makes the size of a copy a multiple of 128 bytes.
        """
        return -(-self.groups * (1 + self.zeros) * self.m_tile // 32) * 32 // self.m_tile

    @property
    def stages(self) -> int:
        """The number of blocks in flight, and no more than a block of the grid copies in all."""
        copies = -(-self.items // self.grid) * min(self.per_part * self.per_segment, self.blocks)
        return min(MAX_STAGES, SHARED_BYTES // self.resident // self.stage_bytes, copies)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory per block in flight."""
        x = self.m_tile * BLOCK * self.decoder.dtype.itemsize
        x_groups = 4 * self.x_rows * self.m_tile if "x_groups" in self.of_x else 0
        return self.n_tile * PLANE + x + x_groups
