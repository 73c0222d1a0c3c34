"""An embedding may be a weight of any format, and the head of a tied model at the same time."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools import checkpoint
from pallas_kernels.formats import Int8Weight, plain_weight
from pallas_kernels.interleave import interleave
from specjax.model.kv_cache import KVCache
from specjax.model.layers import Linear
from specjax.model.params import Params, stored
from tests.checkpoints.test_checkpoint import assert_same
from tests.support.compiled import dequantize, forward
from tests.support.random_models import CONFIG, quantized_model, random_model, random_prompts
from tests.support.random_weights import random_weight

TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True, dtype="bfloat16", num_layers=1)
TOKENS = jnp.array([[5, 17, 95], [0, 16, 15]], jnp.int32)


@cache
def model(name: str) -> Params:
    """A 4-bit model that is tied to an embedding of the named format."""
    weight = random_weight(name, TIED.vocab_size, TIED.hidden_size)
    return dataclasses.replace(quantized_model(TIED), embedding=weight, lm_head=None)


def logits(params: Params) -> np.ndarray:
    cache = KVCache.create(params.config, 2, 256)
    positions = jnp.broadcast_to(jnp.arange(3), TOKENS.shape)
    return np.asarray(forward(params, TOKENS, positions, cache)[0])


# A look-up gives the weight's values, rounded to the model's dtype; the head is the weight.
@pytest.mark.parametrize("name", ["int8-32-minima", "int4-32", "mxfp4"])
@pytest.mark.covering(1)
def test_look_ups_are_the_rounded_values(name: str) -> None:
    params = model(name)
    values = dequantize(params.embedding).astype(jnp.bfloat16)
    apart = dataclasses.replace(
        params,
        embedding=plain_weight(values),
        lm_head=Linear(params.embedding),
        config=dataclasses.replace(TIED, tie_word_embeddings=False),
    )
    np.testing.assert_array_equal(logits(params), logits(apart))
    np.testing.assert_array_equal(logits(params), logits(specjax.prepack(params)))


def test_drafts_change_nothing() -> None:
    params = specjax.prepack(model("int8-32-minima"))
    prompts = random_prompts((5, 9), TIED.vocab_size)
    plain, drafted = (
        specjax.decode(params, prompts, drafter=drafter, max_new_tokens=16)
        for drafter in (specjax.Autoregressive(), specjax.QSpec())
    )
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


def test_it_is_stored_and_counted(tmp_path: Path) -> None:
    params = specjax.prepack(model("int8-32-minima"))
    assert isinstance(params.embedding, Int8Weight)
    checkpoint.save(params, tmp_path / "model")
    assert_same(checkpoint.load(tmp_path / "model"), params)
    rest = dataclasses.replace(params, embedding=jnp.zeros(0))
    assert params.nbytes == rest.nbytes + params.embedding.nbytes
    assert stored(params).embedding.out_features is None
    assert interleave(stored(params).embedding).out_features == TIED.vocab_size


# Methods that leave the embedding as it is keep it; the others, and formats that lack it, say so.
def test_what_quantize_and_export_make_of_it(tmp_path: Path) -> None:
    untied = random_model(dataclasses.replace(CONFIG, num_layers=1))
    weight = model("int8-32-minima").embedding
    params = dataclasses.replace(untied, embedding=weight)
    assert specjax.quantize(params, "rtn").embedding is weight
    calibration = np.arange(64).reshape(2, 32)
    assert specjax.quantize(params, "awq", calibration=calibration).embedding is weight
    with pytest.raises(ValueError, match="embedding is quantized already; quantize a model in 16"):
        specjax.quantize(params, "quarot")
    tied = dataclasses.replace(
        params, lm_head=None, config=dataclasses.replace(params.config, tie_word_embeddings=True)
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight is quantized already"):
        specjax.quantize(tied, "rtn", lm_head=True)
    with pytest.raises(ValueError, match="cannot represent the weight embedding: it is looked up"):
        specjax.export(params, tmp_path / "out")
