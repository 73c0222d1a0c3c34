"""Checks the shapes and dtypes in annotations while the tests run. pyproject.toml loads it.

jaxtyping compiles the checks into the modules below when they are imported, so this plugin must be
loaded before anything imports them.
"""

from __future__ import annotations

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = (
    "pallas_kernels.attention",
    "pallas_kernels.hadamard",
    "pallas_kernels.matmul",
    "pallas_kernels.norms",
    "pallas_kernels.rope",
    "specjax.model.rope",
    "specjax.model.transformer",
    "specjax.speculation.acceptance",
    "specjax.speculation.rounds",
    "specjax.speculation.sampling",
    "specjax.speculation.trees",
    "specjax.speculation.verification",
)

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # int counts as float, as in mypy
install_import_hook(CHECKED, f"{__name__}.typechecker")
