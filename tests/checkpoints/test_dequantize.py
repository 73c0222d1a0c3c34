"""A quantized model turned into one in 16 or 32 bits has the same values, and can be cast again."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pallas_kernels.formats import Int4Weight, Int8Weight, Mxfp4Weight, Quantized
from specjax.commands.options import load_target
from specjax.model.params import Params
from specjax.model.weight_names import is_block_matrix, named_weights
from tests.checkpoints.test_checkpoint import assert_same
from tests.support.compiled import dequantize, plain_values
from tests.support.random_models import CONFIG, quantized_model, random_model
from tests.support.random_weights import random_weight, random_weights

TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True, num_layers=1, dtype="bfloat16")


def tied_model() -> Params:
    """4-bit layers, and an 8-bit embedding with minima that is also the head, as SmolLM2 has."""
    embedding = random_weight("int8-32-minima", TIED.vocab_size, TIED.hidden_size)
    return specjax.prepack(
        dataclasses.replace(quantized_model(TIED), embedding=embedding, lm_head=None)
    )


def test_every_format_becomes_its_values() -> None:
    model = random_model(dataclasses.replace(CONFIG, num_layers=1))
    (layer,) = model.layers
    for name, weight in random_weights(*layer.q.weight.shape).items():
        q = dataclasses.replace(layer.q, weight=weight)
        given = dataclasses.replace(model, layers=(dataclasses.replace(layer, q=q),))
        expected = np.asarray(dequantize(weight))
        for dtype in ("float32", "bfloat16"):
            got = specjax.dequantize(specjax.prepack(given), dtype).layers[0].q.weight
            assert not isinstance(got, Quantized), name
            rounded = jnp.asarray(expected, dtype)
            np.testing.assert_array_equal(plain_values(got), rounded, err_msg=name)
            assert plain_values(got).dtype == dtype


def test_what_is_not_quantized_is_shared_or_cast() -> None:
    params = tied_model()
    same = specjax.dequantize(params)
    assert same.config == params.config
    assert same.final_norm is params.final_norm
    assert not any(isinstance(weight, Quantized) for weight in named_weights(same).values())
    again = specjax.dequantize(same)
    pairs = zip(jax.tree.leaves(same), jax.tree.leaves(again), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    wide = specjax.dequantize(same, "float32")
    assert wide.config.dtype == "float32" and wide.final_norm.dtype == jnp.float32
    np.testing.assert_array_equal(wide.embedding, plain_values(same.embedding))


def test_the_result_can_be_cast_head_and_all() -> None:
    cast = specjax.quantize(specjax.dequantize(tied_model()), "mxfp4", lm_head=True)
    assert cast.lm_head is not None and isinstance(cast.lm_head.weight, Mxfp4Weight)
    assert all(isinstance(linear.weight, Mxfp4Weight) for linear in cast.linears())


def test_refusals() -> None:
    params = tied_model()
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float32, got 'int8'"):
        specjax.dequantize(params, "int8")
    with pytest.raises(ValueError, match=r"params must be what specjax\.load returns, got dict"):
        specjax.dequantize({})
    divided = specjax.parallel.shard(params, specjax.parallel.mesh())
    with pytest.raises(ValueError, match="dequantize a model on one device"):
        specjax.dequantize(divided)
    with pytest.raises(ValueError, match=r"which specjax\.dequantize\(params\) makes"):
        specjax.quantize(params)


# The embedding stays as it is: only matrices of the blocks are rounded a second time.
def test_convert_rounds_again_and_says_so(tmp_path: Path) -> None:
    params = tied_model()
    specjax.save(params, tmp_path / "four")
    with pytest.warns(UserWarning, match="four is quantized already; its weights are rounded a"):
        specjax.convert(tmp_path / "four", tmp_path / "out", quantization="mxfp4", progress=False)
    got, exact = specjax.load(tmp_path / "out"), specjax.dequantize(params, "float32")
    assert isinstance(got.embedding, Int8Weight) and got.lm_head is None
    expected = named_weights(specjax.quantize(exact, "mxfp4"))
    for name, weight in named_weights(got).items():
        if is_block_matrix(name):
            np.testing.assert_array_equal(dequantize(weight), dequantize(expected[name]))


@pytest.mark.exhaustive
def test_commands_round_again_and_say_so() -> None:
    with pytest.warns(UserWarning, match="tiny is quantized already; its weights are rounded"):
        target = load_target("tiny", "rtn", 32)
    q = target.params.layers[0].q.weight
    assert isinstance(q, Int4Weight) and q.group_size == 32
    with warnings.catch_warnings(action="error"):
        assert_same(load_target("tiny", None, 32).params, specjax.load("tiny"))
