"""Everything about a call of the kernel that is known before it runs."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.formats import BLOCK, PLANE
from pallas_kernels.mosaic_gpu.words import Decoder

MULTIPROCESSORS = 132  # of an H100 or H200
ROWS = 64  # outputs of one warpgroup: the rows of a wgmma
SHARED_BYTES = 200 * 1024  # of the 227 KiB that a block of the grid may have
MAX_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel runs.

    m, n: rows of x and outputs, whole tiles; m_tile, n_tile: of one item of work.
    blocks: of 256 inputs; per_segment: blocks per segment, at most.
    parts: items into which the inputs of a tile are split: 1 or one per segment.
    group: inputs per product.
    decoder: how words become operands.
    operands: the names of the kernel's arguments, see `call`.
    exponents: whether scales are E8M0.
    interpreted: whether the kernel is for interpret mode.
    """

    m: int
    n: int
    m_tile: int
    n_tile: int
    blocks: int
    per_segment: int
    parts: int
    group: int
    decoder: Decoder
    operands: tuple[str, ...]
    exponents: bool = False
    interpreted: bool = False

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.n_tile // ROWS

    @property
    def segments(self) -> int:
        """The number of sums into which the inputs fall, for every M."""
        return -(-self.blocks // self.per_segment)

    @property
    def items(self) -> int:
        """Units of work: a tile of y and a part of the inputs."""
        return (self.m // self.m_tile) * (self.n // self.n_tile) * self.parts

    @property
    def groups(self) -> int:
        """Products per block."""
        return BLOCK // self.group

    @property
    def in_flight(self) -> int:
        """Products at once, of whole planes, as far as a thread's registers go."""
        return max(2, PLANE // self.group) if self.m_tile <= 64 else PLANE // self.group

    @property
    def scaled(self) -> bool:
        """Whether products have scales. Otherwise they are only added."""
        return "scales" in self.operands

    @property
    def zeros(self) -> bool:
        """Whether the kernel knows of zeros."""
        return "zeros" in self.operands

    @property
    def integer(self) -> bool:
        """Whether the products are of integers."""
        return self.decoder.dtype == np.int8

    @property
    def product_dtype(self) -> np.dtype:
        """The dtype of a group's product."""
        return np.dtype(np.int32 if self.integer else np.float32)

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype of a segment's sum: without scales, what the products are."""
        return np.dtype(np.float32) if self.scaled else self.product_dtype

    @property
    def width(self) -> int:
        """Inputs of an operand; more than a group's where no instruction is so narrow."""
        return max(self.group, 64) if self.integer else self.group

    @property
    def swizzle(self) -> int:
        """Bytes of x in a swizzled row."""
        return min(self.width * self.decoder.dtype.itemsize, 128)

    @property
    def x_rows(self) -> int:
        """Rows of a block's x_groups: scales, sums where there are zeros, and as many unused as
        make a copy of whole 128 bytes."""
        return -(-self.groups * (1 + self.zeros) * self.m_tile // 32) * 32 // self.m_tile

    @property
    def stages(self) -> int:
        """Blocks in flight."""
        return min(MAX_STAGES, SHARED_BYTES // self.stage_bytes)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a block in flight."""
        x = self.m_tile * BLOCK * self.decoder.dtype.itemsize
        x_groups = 4 * self.x_rows * self.m_tile if "x_groups" in self.operands else 0
        return self.n_tile * PLANE + x + x_groups
