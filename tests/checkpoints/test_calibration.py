"""Calibration observes the model's own activations, layer by layer, and samples its text evenly."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools.quantization import calibration, quantize
from checkpoints_tools.quantization.calibration import calibration_tokens
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import linear, norm
from tests.support.compiled import forward
from tests.support.random_models import CONFIG, quantized_model, random_model

TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 20))


# From layer to layer, the hidden states are those of the model's own pass: its logits come out, to
# within the multiplications and additions that a compiler fuses in one program only.
@pytest.mark.parametrize("make", [random_model, quantized_model])
def test_advance_is_forward(make) -> None:
    params = make()
    config = params.config
    hidden = calibration.embed(params.embedding, TOKENS, config)
    for index, layer in enumerate(params.layers):
        hidden = calibration.advance(layer, hidden, index, config, lambda: None)
    logits = linear(norm(hidden, params.final_norm, config, hidden.dtype), params.head, "a16")
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    cache = KVCache.create(config, *TOKENS.shape)
    expected, _ = forward(params, jnp.asarray(TOKENS), positions, cache)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


# The statistics are means over all tokens of all sequences, of what each layer reads.
def test_observe() -> None:
    params = random_model()
    config, layer = params.config, params.layers[0]
    hidden = calibration.embed(params.embedding, TOKENS, config)
    steps: list[None] = []
    statistics = calibration.observe(layer, hidden, 0, config, lambda: steps.append(None))
    assert len(steps) == len(TOKENS)
    x = np.asarray(norm(hidden, layer.attention_norm, config, hidden.dtype)).reshape(-1, 64)
    assert statistics["q"] is statistics["k"] is statistics["v"]
    np.testing.assert_allclose(statistics["q"].second_moment, x.T @ x / len(x), atol=1e-5)
    np.testing.assert_allclose(statistics["q"].magnitude, np.abs(x).mean(axis=0), rtol=1e-5)
    sizes = {name: each.magnitude.shape for name, each in statistics.items()}
    assert sizes == dict.fromkeys(("q", "k", "v", "gate", "up"), (64,)) | {
        "o": (96,),
        "down": (172,),
    }


class Words:
    """A tokenizer of numbers, which begins every text with 1."""

    def encode(self, text: str) -> list[int]:
        return [1, *map(int, text.split())]


# Sequences are evenly spread over the text, and each begins with the token that begins a text.
def test_calibration_tokens(wrong_types: None) -> None:
    text = " ".join(map(str, range(10, 60)))
    tokens = calibration_tokens(text, Words(), sequences=3, length=11)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 0], 1)
    np.testing.assert_array_equal(tokens[:, 1], [10, 30, 50])
    np.testing.assert_array_equal(tokens[:, 1:] - tokens[:, 1:2], np.tile(np.arange(10), (3, 1)))
    np.testing.assert_array_equal(
        calibration_tokens(text, Words(), sequences=1, length=51)[0, 1:], range(10, 60)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 52}, "the calibration text has 50 tokens, one sequence needs 51"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
    ],
)
def test_calibration_text_refusals(
    options: dict[str, int], message: str, wrong_types: None
) -> None:
    with pytest.raises(ValueError, match=message):
        calibration_tokens(" ".join(map(str, range(10, 60))), Words(), **options)


@pytest.mark.parametrize(
    ("method", "tokens", "message"),
    [
        ("gptq", None, "method 'gptq' needs calibration: tokens, int32[S, T]"),
        ("rtn", TOKENS, "method 'rtn' does not use calibration; leave it out"),
        (
            "gptq",
            TOKENS[0],
            "calibration must be integers [S, T], S sequences of T tokens each, got int64[20]",
        ),
        ("gptq", TOKENS * 1.0, "got float64[3, 20]"),
        ("gptq", TOKENS[:, :0], "got int64[3, 0]"),
        ("gptq", TOKENS + 80, "the vocabulary has 96 tokens"),
        ("gptq", TOKENS - 96, "the vocabulary has 96 tokens"),
        ("gptq", np.zeros((1, 513), int), "sequences of 513 tokens, the model has 512 positions"),
    ],
)
def test_calibration_refusals(method: str, tokens: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(random_model(), method, calibration=tokens)
