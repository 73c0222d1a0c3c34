"""Methods that keep a bfloat16 model exactly: bfloat12, and nested16 with its draft plane."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools import checkpoint
from checkpoints_tools.conversion import quantize_checkpoint
from checkpoints_tools.exporting import export
from checkpoints_tools.loading import load
from pallas_kernels import cpu
from pallas_kernels.bfloat12 import Bfloat12Weight
from pallas_kernels.formats import Bfloat16Weight, Int4Weight, Mxfp4Weight, plain_weight
from pallas_kernels.matmul import matmul
from pallas_kernels.nested import NestedWeight
from specjax.drafting.calibration import costs_of
from specjax.model.config import ModelConfig
from specjax.model.layers import LayerStack
from specjax.model.params import Params, stored
from specjax.model.sizes import weight_bytes
from specjax.model.weight_names import is_block_matrix, named_weights
from tests.checkpoints.test_checkpoint import assert_same
from tests.support.covering import left_out, representatives
from tests.support.random_models import CONFIG, random_model, random_prompts

BF16 = dataclasses.replace(CONFIG, dtype="bfloat16", vocab_size=107, intermediate_size=300)
TIED = dataclasses.replace(BF16, tie_word_embeddings=True)
METHODS = ("bfloat12", "nested16", "nested16+mxfp4", "nested16+gptq")
PROMPTS = random_prompts((9, 4, 13), BF16.vocab_size)
NEW = 24


DRAFTERS = [
    specjax.Autoregressive(),
    specjax.QSpec(3, "a8"),
    specjax.PromptLookup(4),
    specjax.MultiLevel(specjax.QSpec(4, "a8"), specjax.NGram(2)),
    specjax.QSpec(2, "a4"),
    specjax.Auto(),
    specjax.LayerSkip((0,), 2),
]
PAIRS = [(drafter, tied) for drafter in DRAFTERS for tied in (True, False)]


def groups(method: str) -> dict[str, int]:
    """Groups of 64, where the method has a choice."""
    return {} if method in ("bfloat12", "nested16+mxfp4") else {"group_size": 64}


@functools.cache
def plain_model(tied: bool) -> Params:
    model = random_model(BF16)
    if tied:
        model = dataclasses.replace(model, lm_head=None, config=TIED)
    return specjax.prepack(model)


@functools.cache
def exact_model(method: str, tied: bool = False) -> Params:
    calibration = None
    if method.endswith("gptq"):
        calibration = np.random.default_rng(0).integers(0, BF16.vocab_size, (4, 32))
    return specjax.quantize(plain_model(tied), method, **groups(method), calibration=calibration)


def same_bits(one: Params, other: Params) -> None:
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.covering(1)
def test_every_matrix_is_exact(method: str, tied: bool) -> None:
    exact, plain = exact_model(method, tied), plain_model(tied)
    assert exact.config == plain.config
    assert isinstance(exact.layers, LayerStack) == cpu.available()
    same_bits(specjax.dequantize(exact), plain)
    drafts = Mxfp4Weight if method.endswith("mxfp4") else Int4Weight
    for name, weight in named_weights(exact).items():
        nested = is_block_matrix(name) or name == ("embedding" if tied else "lm_head.weight")
        if nested and method != "bfloat12":
            assert isinstance(weight, NestedWeight) and isinstance(weight.draft, drafts), name
            weight = weight.exact
        assert isinstance(weight, Bfloat12Weight) or weight.ndim == 1, name
    assert exact.quantized == (method != "bfloat12")
    assert ("Bfloat12Weight" if method == "bfloat12" else "NestedWeight") in repr(exact)


@pytest.mark.parametrize("name", [left_out("tiny-16bit"), left_out("stories260K")])
def test_real_models_come_back(name: str, request: pytest.FixtureRequest) -> None:
    if name == "stories260K":
        name = str(request.getfixturevalue("data") / "models" / name / "hf")
    params = specjax.dequantize(specjax.load(name), "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_bits(specjax.dequantize(specjax.quantize(params, "bfloat12")), params)


@pytest.mark.exhaustive
def test_its_bytes() -> None:
    """At most 1.02 times those of the bfloat16 model, head and embedding included."""
    params = specjax.load("tiny-16bit")
    for method, low, high in (("bfloat12", 0.75, 0.76), ("nested16", 1.0, 1.02)):
        exact = specjax.quantize(params, method, **groups(method))
        assert low < exact.nbytes / params.nbytes <= high
        counted = weight_bytes(params.config, method, group_size=64)
        assert counted <= exact.nbytes < 1.005 * counted  # the rest are escapes
    shape = ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    assert weight_bytes(shape, "nested16", group_size=64) < 1.018 * weight_bytes(shape)


@pytest.mark.recompiled
@pytest.mark.parametrize(("drafter", "tied"), representatives(PAIRS, PAIRS[1], PAIRS[6]), ids=repr)
def test_greedy_output_is_the_plain_models(drafter: specjax.Drafter, tied: bool) -> None:
    options = {"max_new_tokens": NEW, "logprobs": 2}
    plain = specjax.decode(plain_model(tied), PROMPTS, drafter=specjax.Autoregressive(), **options)
    for method in METHODS if isinstance(drafter, specjax.QSpec) else METHODS[:2]:
        if isinstance(drafter, specjax.QSpec | specjax.MultiLevel) and method == "bfloat12":
            continue
        result = specjax.decode(exact_model(method, tied), PROMPTS, drafter=drafter, **options)
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        jax.tree.map(np.testing.assert_array_equal, result.logprobs, plain.logprobs)
        if isinstance(drafter, specjax.QSpec) and drafter.activation == "a8":
            assert 0 < float(result.stats.acceptance_rate) < 1, "a case that tests nothing"


def test_the_draft_reads_the_draft_plane_alone() -> None:
    """With the draft plane of another model nearly no draft is kept, and no output changes."""
    exact, other = exact_model("nested16"), specjax.quantize(random_model(BF16, 1), "nested16")

    def crossed(one: object, two: object) -> object:
        return NestedWeight(one.exact, two.draft) if isinstance(one, NestedWeight) else one

    mixed = jax.tree.map(
        crossed, exact, specjax.prepack(other), is_leaf=lambda w: isinstance(w, NestedWeight)
    )
    plain = specjax.decode(exact, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive())
    rates = []
    for params in (exact, mixed):
        result = specjax.decode(params, PROMPTS, max_new_tokens=NEW, drafter=specjax.QSpec(3))
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        rates.append(float(result.stats.acceptance_rate))
    assert rates[1] < 0.2 < rates[0]


@pytest.mark.exhaustive
def test_queues_and_costs() -> None:
    results = specjax.decode_many(
        exact_model("nested16"), PROMPTS, rows=2, max_new_tokens=NEW, drafter=specjax.QSpec(3)
    )
    expected = specjax.decode_many(plain_model(False), PROMPTS, rows=2, max_new_tokens=NEW)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert costs_of(exact_model("nested16"), 1).passes.shape == (4,)


@pytest.mark.parametrize("activation", ["a16", "a8", "a4"])
def test_a_product_reads_one_plane(activation: str) -> None:
    weight = exact_model("nested16").head.weight
    assert isinstance(weight, NestedWeight)
    plane = weight.exact if activation == "a16" else weight.draft
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, weight.shape[1])), jnp.bfloat16)
    np.testing.assert_array_equal(matmul(x, weight, activation), matmul(x, plane, activation))


@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.covering(1)
def test_checkpoints(tmp_path: Path, method: str, tied: bool) -> None:
    """Saved, or converted from a checkpoint, a model is the one in memory; exported, the plain."""
    plain, exact = plain_model(tied), exact_model(method, tied)
    specjax.save(exact, tmp_path / "saved")
    assert_same(checkpoint.load(tmp_path / "saved"), exact)
    specjax.save(plain, tmp_path / "plain")
    quantize_checkpoint(
        tmp_path / "plain", tmp_path / "made", method, **groups(method), progress=False
    )
    assert_same(load(tmp_path / "made"), exact)
    export(exact, tmp_path / "exported")
    export(plain, tmp_path / "exported plain")
    for file in (tmp_path / "exported plain").iterdir():
        assert file.read_bytes() == (tmp_path / "exported" / file.name).read_bytes()


def test_a_matrix_that_does_not_fit_stays_in_16_bits() -> None:
    model = plain_model(False)
    bits = np.random.default_rng(0).integers(0, 2**14, (107, 64), dtype=np.uint16)
    odd = dataclasses.replace(model, embedding=plain_weight(jnp.asarray(bits).view(jnp.bfloat16)))
    with pytest.warns(UserWarning, match=r"embedding stays in 16 bits: \d+ of its 6848 values"):
        made = specjax.quantize(odd, "nested16")
    assert isinstance(made.embedding, Bfloat16Weight)
    assert_same(specjax.dequantize(made), odd)
    tied = dataclasses.replace(odd, lm_head=None, config=TIED)
    with pytest.warns(UserWarning, match="stays in 16 bits"):
        made = specjax.quantize(tied, "nested16")
    assert isinstance(made.embedding, NestedWeight)
    assert isinstance(made.embedding.exact, Bfloat16Weight)
    assert_same(specjax.dequantize(made), tied)


def test_quantizing_an_exact_model_is_quantizing_the_plain_one() -> None:
    """The embedding and the head, which stay as they are, stay in 12 bits."""
    expected = specjax.dequantize(specjax.quantize(plain_model(False), "rtn"))
    for method in METHODS[:2]:
        made = specjax.quantize(exact_model(method), "rtn")
        assert not isinstance(made.layers[0].q.weight, NestedWeight)
        assert_same(specjax.dequantize(made), expected)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("nested16+awq", {}, r"nested16 stands alone or before rtn, .* got 'nested16\+awq'"),
        ("nested16+rtn+gptq", {}, "nested16 stands alone or before"),
        ("bfloat12+rtn", {}, r"bfloat12 stands alone, got 'bfloat12\+rtn'"),
        ("bfloat12", {"bits": 2}, "leave group_size and bits out, got 128 and 2"),
        ("bfloat12", {"group_size": 64}, "leave group_size and bits out, got 64 and 4"),
        ("nested16+mxfp4", {"group_size": 64}, "mxfp4 has groups of 32; leave group_size out"),
        ("quarot+nested16", {}, "method must be one of .* or bfloat12 or nested16"),
        ("nested16", {"bits": 3}, "nested16 drafts in 4 bits; leave bits out, got 3"),
        ("nested16+gptq", {}, "needs calibration"),
    ],
)
def test_refusals(method: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specjax.quantize(plain_model(False), method, **options)


def test_float32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps bfloat16 matrices, and the model's dtype is f"):
        specjax.quantize(random_model(), "bfloat12")


def test_planes_that_disagree_are_refused(tmp_path: Path) -> None:
    exact = stored(exact_model("nested16"))
    first = exact.layers[0]
    q, gate = first.q.weight, first.gate.weight
    for draft, message in (
        (gate.draft, "both planes must be of one matrix"),
        (specjax.quantize(plain_model(False), "int8").layers[0].q.weight, "must have 4 bits"),
    ):
        mixed = dataclasses.replace(first.q, weight=NestedWeight(q.exact, draft))
        layers = (dataclasses.replace(first, q=mixed), *exact.layers[1:])
        specjax.save(dataclasses.replace(exact, layers=layers), tmp_path / "out")
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path / "out")
    specjax.save(exact, tmp_path / "out")
    place = tmp_path / "out" / "config.json"
    description = json.loads(place.read_text())
    del description["quantized"]["layers.0.q.weight"]["draft"]
    place.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load(tmp_path / "out")
