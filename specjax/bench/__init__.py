"""Drafters beside plain decoding: what each costs and gains on a model, a batch size, and texts."""

from specjax.bench.cells import Cell as Cell
from specjax.bench.cells import read_cells as read_cells
from specjax.bench.grid import Subject as Subject
from specjax.bench.grid import bench as bench
