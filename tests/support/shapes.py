"""Checks the shapes and dtypes in annotations while the tests run. pyproject.toml loads it.

jaxtyping compiles the checks into the modules below when they are imported, so this plugin must be
loaded before anything imports them. The constructors of dataclasses are not checked, because JAX
makes pytrees of placeholders too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = (
    "checkpoints_tools.prequantized.layout",
    "checkpoints_tools.quantization.atom",
    "checkpoints_tools.quantization.awq",
    "checkpoints_tools.quantization.calibration",
    "checkpoints_tools.quantization.exact",
    "checkpoints_tools.quantization.gptq",
    "checkpoints_tools.quantization.mxfp4",
    "checkpoints_tools.quantization.nested8",
    "checkpoints_tools.quantization.quarot",
    "checkpoints_tools.quantization.rtn",
    "pallas_kernels.activations",
    "pallas_kernels.attention",
    "pallas_kernels.bfloat12",
    "pallas_kernels.cache_entries",
    "pallas_kernels.formats",
    "pallas_kernels.hadamard",
    "pallas_kernels.matmul",
    "pallas_kernels.new_entries",
    "pallas_kernels.norms",
    "pallas_kernels.planes",
    "pallas_kernels.rope",
    "pallas_kernels.row_sums",
    "pallas_kernels.swiglu",
    "pallas_kernels.weight_values",
    "specjax.drafting.acceptance_rates",
    "specjax.drafting.chain",
    "specjax.drafting.datastore",
    "specjax.drafting.lookahead",
    "specjax.drafting.ngram_tables",
    "specjax.drafting.retrieval",
    "specjax.drafting.schedules",
    "specjax.drafting.suffix",
    "specjax.drafting.suffix_memory",
    "specjax.drafting.window",
    "specjax.evaluation.scoring",
    "specjax.model.kv_cache",
    "specjax.model.parallel",
    "specjax.model.rope",
    "specjax.model.transformer",
    "specjax.planning.layer_search",
    "specjax.speculation.acceptance",
    "specjax.speculation.drafter",
    "specjax.speculation.logprobs",
    "specjax.speculation.penalties",
    "specjax.speculation.rounds",
    "specjax.speculation.sampling",
    "specjax.speculation.state",
    "specjax.speculation.trees",
    "specjax.speculation.verification",
    "specjax.speculation.walk",
)

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # int counts as float, as in mypy


def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the function check its arguments and its result, unless it is a constructor."""
    return function if function.__name__ == "__init__" else checked(function)


install_import_hook(CHECKED, f"{__name__}.typechecker")
