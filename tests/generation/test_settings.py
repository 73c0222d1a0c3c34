"""The caller's settings of JAX's types change no token: 64 bits, and strict promotion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Adaptive, Combined, DraftModel, LayerSkip, Lookahead, MultiLevel, Sampling
from specjax.drafting.datastore import Datastore
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, quantized_model, random_model
from tests.support.small_tokenizers import PERMUTED, TINY
from tests.support.tree_drafter import TreeDrafter

PARAMS = quantized_model()
SMALL = random_model(seed=1)
PROMPTS = [[5, 6, 7, 5, 6], [1, 2, 3]]
STORE = Datastore.create([np.arange(20) % 9], CONFIG.vocab_size)
DRAFTERS = {
    "none": specjax.Autoregressive(),
    "QSpec": specjax.QSpec(2, schedule=specjax.Heuristic()),
    "a model": DraftModel(SMALL, 2, confidence=0.1),
    "layers": LayerSkip((0,), 2, schedule=Adaptive()),
    "levels": MultiLevel(DraftModel(SMALL, 2), specjax.PromptLookup(2)),
    "n-grams": specjax.NGram(2),
    "window": Lookahead(3, 2, 2, capacity=64),
    "guesses": Combined(
        specjax.Spectra(3, 2, 1, capacity=64), specjax.Retrieval(STORE, depth=2, shortest=1)
    ),
    "tree": TreeDrafter(PARAMS, (2, 1)),
}
EVERYTHING = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
SAMPLINGS = pytest.mark.parametrize(
    "sampling", representatives([None, EVERYTHING], None), ids=["greedy", "sampled"]
)


@contextmanager
def wide_and_strict() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def _options(sampling: Sampling | None) -> dict[str, object]:
    key = None if sampling is None else jax.random.key(1)
    return {"max_new_tokens": 6, "sampling": sampling, "key": key}


@SAMPLINGS
@pytest.mark.parametrize("name", representatives(DRAFTERS, "QSpec", "levels", "guesses"))
def test_the_program_is_the_same(name: str, sampling: Sampling | None) -> None:
    options = _options(sampling) | {"drafter": DRAFTERS[name]}

    def program() -> str:
        """All that decoding computes."""
        text = str(
            jax.make_jaxpr(lambda params: specjax.decode(params, PROMPTS, **options))(PARAMS)
        )
        return re.sub("0x[0-9a-f]+", "", text)

    plain = program()
    with wide_and_strict():
        assert program() == plain


@SAMPLINGS
def test_the_tokens_are_the_same(sampling: Sampling | None) -> None:
    options = _options(sampling) | {"drafter": DRAFTERS["QSpec"]}
    plain = specjax.decode(PARAMS, PROMPTS, **options)
    with wide_and_strict():
        rows = jnp.array([PROMPTS[0], [*PROMPTS[1], 0, 0]])
        assert rows.dtype == jnp.int64
        lengths = {"prompt_lengths": jnp.array([5, 3])}
        decode = jax.jit(lambda rows, given: specjax.decode(PARAMS, rows, **given, **options))
        result = decode(rows, lengths)
        completions = specjax.decode_many(PARAMS, PROMPTS, rows=1, **options)
        assert sum(len(each.tokens) for each in specjax.stream(PARAMS, PROMPTS[1], **options)) == 6
    jax.tree.map(np.testing.assert_array_equal, result, plain)
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(each)] for each in (result, plain)]
    assert dtypes[0] == dtypes[1]
    for completion, tokens, length in zip(completions, plain.tokens, plain.lengths, strict=True):
        np.testing.assert_array_equal(completion.tokens, tokens[:length])


@pytest.mark.exhaustive
def test_another_tokenizer_is_asked_with_32_bits() -> None:
    """Its part runs on the host, outside the program."""
    size = TINY.vocab_size
    target, twin = (random_model(specjax.ModelConfig(**{**vars(CONFIG), "vocab_size": size})),) * 2
    options = {"max_new_tokens": 6, "drafter": specjax.TranslatedDraft(twin, PERMUTED, TINY, 2)}
    plain = specjax.decode(target, PROMPTS, **options)
    with wide_and_strict():
        result = specjax.decode(target, PROMPTS, **options)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
