"""The rows and the context that a server has room for."""

from __future__ import annotations

from typing import Any

import pytest

import specjax
from specjax.generation.request import Request
from specjax.model.sizes import cache_bytes
from specjax.serving.room import make_plan
from tests.support.random_models import CONFIG, quantized_model

USUAL: dict[str, Any] = {
    "rows": None, "context": None, "most_bytes": None, "queue": 4, "prefix_bytes": 0, "logprobs": 5
}  # fmt: skip


@pytest.fixture(scope="module")
def request_() -> Request:
    return Request.make(quantized_model(), drafter=specjax.QSpec(3))


def test_the_context_is_the_models_and_the_rows_are_eight(request_) -> None:
    plan = make_plan(CONFIG, request_, **USUAL)
    assert (plan.rows, plan.context) == (8, CONFIG.max_position_embeddings)


def test_rows_fill_the_memory_beside_the_one_that_is_read(request_) -> None:
    most = cache_bytes(CONFIG, 6, 100 + 3 - 1)
    plan = make_plan(CONFIG, request_, **{**USUAL, "context": 100, "most_bytes": most})
    assert plan.rows == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 3}, "context must be in 4 … 512, got 3"),
        ({"context": 513}, "context must be in 4 … 512, got 513"),
        ({"rows": 0}, "rows must be in 1 … 4096, got 0"),
        ({"rows": 50, "most_bytes": 10**6}, "50 rows of 512 tokens do not fit into 1.00 MB: "),
        ({"most_bytes": 100}, "100 bytes hold no row of 512 tokens: one needs "),
        ({"logprobs": 10**6}, "logprobs must be in 0 … "),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(request_, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(CONFIG, request_, **{**USUAL, **change})
