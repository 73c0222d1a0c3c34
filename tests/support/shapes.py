"""Checks the shapes and dtypes in annotations while the tests run. pyproject.toml loads it.

jaxtyping compiles the checks into the modules below when they are imported, so this plugin must be
loaded before anything imports them. Two annotated modules are left out: `swiglu` refuses other
shapes itself, and JAX makes `Logprobs` of placeholders too.
"""

from __future__ import annotations

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = (
    "pallas_kernels.activations",
    "pallas_kernels.attention",
    "pallas_kernels.hadamard",
    "pallas_kernels.matmul",
    "pallas_kernels.norms",
    "pallas_kernels.rope",
    "pallas_kernels.row_sums",
    "specjax.model.rope",
    "specjax.model.transformer",
    "specjax.speculation.acceptance",
    "specjax.speculation.penalties",
    "specjax.speculation.rounds",
    "specjax.speculation.sampling",
    "specjax.speculation.trees",
    "specjax.speculation.verification",
    "specjax.speculation.walk",
)

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # int counts as float, as in mypy
install_import_hook(CHECKED, f"{__name__}.typechecker")
