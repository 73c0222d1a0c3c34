"""GGUF files: the blocks' values to the last bit, the model's function, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import struct
import warnings
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from checkpoints_tools.gguf.blocks import EXACT, HELD_AS, to_weight
from checkpoints_tools.gguf.model import open_gguf, their_name
from checkpoints_tools.lazy_checkpoint import LazyCheckpoint
from pallas_kernels.formats import Int4Weight, Int8Weight, Mxfp4Weight
from specjax.model.config import RopeScaling
from specjax.model.kv_cache import KVCache
from specjax.model.rope import rope_frequencies
from specjax.model.weight_names import named_weights, params_from_weights, weight_shapes
from tests.support.compiled import dequantize, forward
from tests.support.gguf_files import (
    CONFIG,
    TOKENS,
    fields,
    random_blocks,
    random_tensors,
    write_gguf,
)

KINDS = gguf.GGMLQuantizationType
OTHERS = ("Q2_K", "Q3_K", "Q6_K")


@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_blocks_have_the_values_of_the_gguf_package(name: str) -> None:
    """Bit for bit, and in the small format where there is one."""
    kind, (n, k) = KINDS[name], (24, 768)
    blocks = random_blocks(kind, n, k)
    with np.errstate(all="ignore"):  # random scales of Q2_K and Q3_K need not be finite
        expected = gguf.quants.dequantize(blocks, kind)
    weight = to_weight(blocks, kind, blocks.shape[1])
    values = np.asarray(dequantize(weight))
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
    assert isinstance(weight, jax.Array) == (name in OTHERS)
    held = {Int4Weight: "int4", Int8Weight: "int8", Mxfp4Weight: "mxfp4"}
    assert HELD_AS.get(name) == held.get(type(weight))
    if name in EXACT:
        assert weight.nbytes <= 2 * blocks.nbytes


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Q4_1 with a tied embedding in Q8_0, as SmolLM2's is."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", fields(), random_tensors())


def logits(params: specjax.Params) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 12)))
    cache = KVCache.create(params.config, 1, 16)
    return np.asarray(jax.jit(forward)(params, tokens, jnp.arange(12)[None], cache)[0])


def by_hand(file: Path) -> specjax.Params:
    """The same model from values that the gguf package reads, in float32."""
    reader = gguf.GGUFReader(file)
    tensors = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors
    }
    config = dataclasses.replace(CONFIG, dtype="float32")
    weights = {}
    for name in weight_shapes(config):
        values = tensors[their_name(name)]
        if name.endswith(("q.weight", "k.weight")):  # pairs of rows become halves of a head
            pairs = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = jnp.asarray(values.reshape(weight_shapes(config)[name]))
    return params_from_weights(config, weights)


def test_the_model_is_what_the_file_says(file: Path) -> None:
    params = specjax.load(file, dtype="float32")
    assert dataclasses.replace(params.config, dtype="bfloat16", rms_norm_eps=1e-5) == CONFIG
    assert isinstance(params.layers[0].q.weight, Int4Weight)
    assert isinstance(params.embedding, Int8Weight)
    np.testing.assert_allclose(logits(params), logits(by_hand(file)), atol=2e-3)


def test_drafts_change_nothing(file: Path) -> None:
    params = specjax.load(file)
    plain, drafted = (
        specjax.decode(params, [[5, 6, 7, 8]], max_new_tokens=12, drafter=drafter)
        for drafter in (specjax.Autoregressive(), specjax.QSpec(2))
    )
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


# A tokenizer that cannot be read is refused before the weights are.
@pytest.mark.parametrize("method", [None, "mxfp4"])
def test_an_unknown_tokenizer_is_refused_first(tmp_path: Path, monkeypatch, method) -> None:
    metadata = {**fields(), "tokenizer.ggml.pre": "unheard-of"}
    file = write_gguf(tmp_path / "model.gguf", metadata, random_tensors())
    monkeypatch.setattr(LazyCheckpoint, "weights", lambda _: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'unheard-of' is not supported"):
        specjax.convert(file, tmp_path / "out", quantization=method, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_file_that_names_no_split_warns(tmp_path: Path) -> None:
    metadata = fields()
    del metadata["tokenizer.ggml.pre"]
    file = write_gguf(tmp_path / "model.gguf", metadata, random_tensors())
    with pytest.warns(UserWarning, match="does not say how its model splits texts"):
        tokenizer = specjax.load_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("the in")) == "the in"


def test_convert(file: Path, tmp_path: Path) -> None:
    specjax.convert(file, tmp_path / "out", progress=False)
    params = specjax.load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, params, specjax.load(file))
    messages = [{"role": "user", "content": "the in an 12 ä"}]
    texts = [specjax.load_tokenizer(path).chat(messages) for path in (file, tmp_path / "out")]
    assert texts == ["<s>user: the in an 12 ä\n"] * 2


def test_quantize(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "plain.gguf", fields(), random_tensors(kind="BF16"))
    specjax.convert(file, tmp_path / "out", quantization="mxfp4", progress=False)
    expected = specjax.quantize(specjax.load(file), "mxfp4")
    jax.tree.map(np.testing.assert_array_equal, specjax.load(tmp_path / "out"), expected)


@pytest.mark.parametrize("kind", ["MXFP4", "Q4_0", "F32"])
def test_what_is_not_finite_is_refused(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(kind=kind)
    data, _ = tensors["blk.0.attn_q.weight"]
    data.view(np.uint8)[0, :4] = 255
    file = write_gguf(tmp_path / "nan.gguf", fields(), tensors)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight in .* holds NaN or infinity"):
        specjax.convert(file, tmp_path / "out", progress=False)


def test_a_split_model_is_the_whole_one(file: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "split.gguf", fields(), random_tensors(), split=8)
    whole, parts = (named_weights(specjax.load(path)) for path in (file, first))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    second = Path(str(first).replace("-00001-", "-00002-"))
    with pytest.raises(ValueError, match="give the first one"):
        specjax.load(second)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"-00002-of-.* does not exist"):
        specjax.load(first)


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "rounded.gguf", fields(), random_tensors(kind="Q6_K"))
    with pytest.warns(UserWarning, match="rounds these matrices: 14 in Q6_K; dtype float32 holds"):
        open_gguf(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_gguf(write_gguf(tmp_path / "exact.gguf", fields(), random_tensors(kind="BF16")))


def test_llama_3_stretches_its_frequencies(tmp_path: Path) -> None:
    stretched = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    config = dataclasses.replace(CONFIG, rope_scaling=stretched)
    factors = (rope_frequencies(CONFIG) / rope_frequencies(config)).astype(np.float32)
    for values, more, error in (
        (factors, {}, None),
        (factors + 1, {}, "not Llama 3.1's rule"),
        (factors, {"llama.rope.scaling.factor": 2.0}, "together with another scaling"),
    ):
        tensors = {**random_tensors(), "rope_freqs.weight": (values, KINDS.F32)}
        file = write_gguf(tmp_path / "llama3.gguf", fields() | more, tensors)
        if error is None:
            assert open_gguf(file).config.rope_scaling == stretched
        else:
            with pytest.raises(ValueError, match=error):
                open_gguf(file)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"scale_linear": 4.0, "scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, None),
        ({"scaling.type": "linear", "scaling.finetuned": True}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            RopeScaling("yarn", 4.0, 128, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5,
             "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0},
            RopeScaling("yarn", 4.0, 512, beta_fast=16.0, beta_slow=2.0,
                        attention_factor=0.5 * (0.1 * math.log(4) + 1)),
        ),
    ],
)  # fmt: skip
def test_scalings_mean_what_they_mean_to_llama_cpp(
    tmp_path: Path, changes: dict, expected: RopeScaling | None
) -> None:
    metadata = fields() | {f"llama.rope.{name}": value for name, value in changes.items()}
    file = write_gguf(tmp_path / "scaled.gguf", metadata, random_tensors())
    assert open_gguf(file).config.rope_scaling == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2' is not supported"),
        ({"llama.block_count": 3}, "lacks the tensor blk.2.attn_k.weight and 8 more"),
        ({"llama.block_count": 1}, "has the tensor blk.1.attn_k.weight and 8 more, which a llama"),
        ({"llama.feed_forward_length": 256}, r"has shape \(512, 256\), but the metadata says"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.rope.dimension_count": 32}, "dimension_count must be 64, all of a head, got 32"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "scaling.yarn_log_multiplier is not sup"),
        ({"llama.rope.scaling.yarn_attn_factor": 2.0}, "scaling.yarn_attn_factor is not supported"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor 2.0 is supported with the type"),
        ({"llama.rope.scaling.type": "llama3"}, "type 'llama3' is not supported; supported: none"),
        ({"llama.rope.scaling.factor": -4.0}, "factor must be a number"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta must be a number"),
        ({"llama.attention.head_count": "4"}, "llama.attention.head_count must be an integer, got"),
        ({"general.alignment": [32]}, "general.alignment must be an integer, got an array of 1 it"),
        ({"llama.expert_count": [0]}, "llama.expert_count must be an integer, got an array of 1"),
        ({"llama.rope.scaling.type": ["none"]}, "llama.rope.scaling.type must be a text, got an"),
        ({"tokenizer.ggml.eot_token_id": [2]}, "tokenizer.ggml.eot_token_id must be an integer"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of texts, got"),
        ({"general.alignment": 48}, "general.alignment must be a power of two, got 48"),
    ],
)  # fmt: skip
def test_models_that_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    metadata = fields() | changes
    architecture = metadata.pop("general.architecture", "llama")
    file = write_gguf(tmp_path / "odd.gguf", metadata, random_tensors(), architecture)
    with pytest.raises(ValueError, match=message):
        open_gguf(file)


@pytest.mark.parametrize(
    ("place", "data", "message"),
    [
        (0, b"GGML", "is neither a directory nor a GGUF file"),
        (4, struct.pack("<I", 1), "has GGUF version 1"),
        (8, struct.pack("<Q", 10**18), "its header announces 1000000000000000000 items"),
        (16, struct.pack("<Q", 10**18), "its header announces 1000000000000000000 items"),
        (24, struct.pack("<Q", 2**63), "its header announces 9223372036854775808 items"),
        (32, b"\x1b]0;", "has a name that cannot be printed"),
    ],
)
def test_headers_that_lie(
    file: Path, tmp_path: Path, place: int, data: bytes, message: str
) -> None:
    content = bytearray(file.read_bytes())
    content[place : place + len(data)] = data
    (tmp_path / "lie.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        specjax.load(tmp_path / "lie.gguf")


def test_truncated_files(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for size in (4, 20, 100, 5000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"is truncated"):
            open_gguf(tmp_path / "cut.gguf")


def test_the_tokenizer(file: Path) -> None:
    tokenizer = specjax.load_tokenizer(file)
    ids = tokenizer.encode("the an 12<|turn|>ä")
    assert [TOKENS[i] for i in ids] == ["the", "Ġan", "Ġ", "1", "2", "<|turn|>", "Ã", "¤"]
    assert tokenizer.decode(ids) == "the an 12ä"
    assert tokenizer.special_tokens()["<|turn|>"] == 3


def test_a_path_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="is neither a directory nor a GGUF file"):
        specjax.load(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("bos_token_id", CONFIG.vocab_size), ("padding_token_id", 2**31)],
)
def test_tokens_that_are_not_there(tmp_path: Path, field: str, value: int) -> None:
    changes = fields() | {f"tokenizer.ggml.{field}": value}
    file = write_gguf(tmp_path / "odd.gguf", changes, {})
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{field} must be an integer from 0 to"):
        specjax.load_tokenizer(file)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("model", ["gpt2"], "a text"), ("pre", 1, "a text"), ("merges", [1.0], "a list of texts"),
        ("token_type", ["1"], "a list of numbers"), ("eos_token_id", "</s>", "an integer"),
        ("add_bos_token", [True, False], "true or false"), ("add_eos_token", 1, "true or false"),
    ],
)  # fmt: skip
def test_fields_of_a_tokenizer_of_another_kind(
    tmp_path: Path, field: str, value: object, kind: str
) -> None:
    changes = fields() | {f"tokenizer.ggml.{field}": value}
    file = write_gguf(tmp_path / "odd.gguf", changes, {})
    with pytest.raises(ValueError, match=rf"odd\.gguf: tokenizer\.ggml\.{field} must be {kind}, "):
        specjax.load_tokenizer(file)
