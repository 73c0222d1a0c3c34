"""The cases of test_parallel.py that need eight devices. Each prints a line of JSON.

python -m tests.support.on_devices
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.memory.parallel import collectives, device_bytes
from checkpoints_tools.quantization import quantize
from specjax.commands import serve
from specjax.commands.meshes import load_on, make_mesh
from specjax.evaluation.likelihood import log_likelihoods
from specjax.evaluation.scoring import score_tokens
from specjax.generation.decoding import start
from specjax.generation.request import Request
from specjax.model.layers import LINEARS
from specjax.model.parallel import mesh, shard
from specjax.serving.asks import Ask, Piece, Plan
from specjax.serving.engine import Engine
from specjax.serving.metrics import Metrics
from specjax.speculation.rounds import step
from tests.support import small_tokenizers
from tests.support.random_models import CONFIG, random_model, random_prompts
from tests.support.random_weights import random_weights

WIDE = dataclasses.replace(
    CONFIG,
    num_layers=1,
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    intermediate_size=176,
    dtype="bfloat16",
)
PROMPTS = random_prompts((5, 9, 3, 7), WIDE.vocab_size)
NEW = 12


def calibration() -> np.ndarray:
    return np.random.default_rng(3).integers(0, WIDE.vocab_size, (4, 32))


def models() -> dict[str, specjax.Params]:
    """One model for each way to store a weight or change its inputs."""
    wide = random_model(WIDE)
    biases = dict.fromkeys(LINEARS, None)
    for name in biases:
        n = getattr(wide.layers[0], name).weight.shape[0]
        biases[name] = jnp.linspace(-1, 1, n, dtype=jnp.bfloat16)

    def biased(layer: Any) -> Any:
        linears = {
            name: dataclasses.replace(getattr(layer, name), bias=biases[name]) for name in LINEARS
        }
        return dataclasses.replace(layer, **linears)

    tied = dataclasses.replace(
        wide,
        layers=tuple(map(biased, wide.layers)),
        embedding=random_weights(WIDE.vocab_size, WIDE.hidden_size)["int8-32-minima"],
        lm_head=None,
        config=dataclasses.replace(
            WIDE, tie_word_embeddings=True, qkv_bias=True, output_bias=True, mlp_bias=True
        ),
    )
    # Eight does not divide 172 features or 90 tokens: gate, up, embedding and head stay whole.
    odd = dataclasses.replace(WIDE, intermediate_size=172, vocab_size=90, dtype="float32")
    return {
        "rtn": quantize(wide, "rtn"),
        "quarot": quantize(wide, "quarot", lm_head=True),
        "atom": quantize(wide, "atom", calibration=calibration()),
        "mxfp4-tied-biased": quantize(tied, "mxfp4"),
        "odd": quantize(random_model(odd), "rtn"),
        # Some of its matrices are not divided in whole tiles: they become plain.
        "nested": quantize(wide, "nested16", group_size=64),
    }


MODELS = models() if __name__ == "__main__" else {}
RTN = MODELS.get("rtn")
SAMPLING = {"sampling": specjax.Sampling(temperature=0.8, top_p=0.9)}


def equal(
    params: Any, data: int, tensor: int, drafter: Callable[[Any], Any] | None = None, **options: Any
) -> None:
    """`decode` on a mesh gives the tokens, counts and levels of one device.

    drafter: makes a drafter from a function that places its model on the target's devices.
    """
    where = mesh(data, tensor)
    if "sampling" in options:
        options["key"] = jax.random.key(5)
    # Auto chooses for the rows of a device, so its counts depend on the mesh.
    makes = drafter or (lambda place: specjax.QSpec() if params.quantized else specjax.NGram())
    chosen = [makes(place) for place in (_here, _onto(where))]
    prompts = [[token % params.config.vocab_size for token in prompt] for prompt in PROMPTS]
    one, many = (
        specjax.decode(p, prompts, max_new_tokens=NEW, drafter=d, **options)
        for p, d in zip((params, shard(params, where)), chosen, strict=True)
    )
    _same(one, many)


def _here(params: Any) -> Any:
    return params


def _onto(where: Any) -> Callable[[Any], Any]:
    return lambda params: shard(params, where)


def _same(one: Any, many: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(many)
    jax.tree.map(np.testing.assert_array_equal, one, many)


def own_cache(place: Callable[[Any], Any]) -> Any:
    small = dataclasses.replace(WIDE, hidden_size=32)
    return specjax.DraftModel(place(quantize(random_model(small, seed=1), "rtn")), draft_length=3)


def two_levels(place: Callable[[Any], Any]) -> Any:
    return specjax.MultiLevel(own_cache(place), specjax.PromptLookup())


def translated(place: Callable[[Any], Any]) -> Any:
    names = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    ours, theirs = (small_tokenizers.letters(" ".join(each)) for each in (names, names[::-1]))
    small = quantize(random_model(dataclasses.replace(WIDE, hidden_size=32), seed=1), "rtn")
    return specjax.TranslatedDraft(place(small), theirs, ours, 3)


def spectra(place: Callable[[Any], Any]) -> Any:
    return specjax.Spectra(ngram=3, window=3, guesses=3, capacity=64)


def plain(place: Callable[[Any], Any]) -> Any:
    return specjax.Autoregressive()


def a4(place: Callable[[Any], Any]) -> Any:
    return specjax.QSpec(activation="a4")


def rounds_one_by_one() -> None:
    """`start` and `step` give a divided model the same states."""
    drafter, divided = specjax.QSpec(), shard(RTN, mesh(2, 4))
    states = [
        start(params, PROMPTS, max_new_tokens=NEW, drafter=drafter) for params in (RTN, divided)
    ]
    for _ in range(3):
        (one, seen), (many, seen_there) = (
            step(params, state, drafter)
            for params, state in zip((RTN, divided), states, strict=True)
        )
        _same((one, seen), (many, seen_there))
        states = [one, many]


def many_prompts() -> None:
    """More prompts than rows, and fewer, on data × tensor give one device's results."""
    prompts = random_prompts((5, 70, 3, 7, 12, 4, 9), WIDE.vocab_size)
    divided = shard(RTN, mesh(2, 4))
    for chosen, rows in ((prompts, 4), (prompts[:3], 8)):  # 8 rows become 4, a multiple of the axis
        runs = [
            specjax.decode_many(
                params, chosen, rows=rows, max_new_tokens=NEW, logprobs=2, drafter=specjax.QSpec()
            )
            for params in (RTN, divided)
        ]
        for one, many in zip(*runs, strict=True):
            _same((one.tokens, one.stats, one.logprobs), (many.tokens, many.stats, many.logprobs))
    stopped = specjax.decode_many(
        divided, prompts, rows=4, max_new_tokens=NEW, stop_when=lambda i, output: len(output) > i
    )
    assert [int(each.stats.generated) for each in stopped] == list(range(1, 8))


def served() -> None:
    """An engine whose model is divided gives the tokens of one device."""
    drafter = specjax.QSpec()
    expected = specjax.decode(RTN, PROMPTS, max_new_tokens=NEW, drafter=drafter, stop_tokens=())
    request = Request.make(shard(RTN, mesh(2, 4)), drafter=drafter, stop_tokens=())
    engine = Engine(shard(RTN, mesh(2, 4)), request, Plan(4, 64, 8, 0, 0), Metrics())
    engine.start()
    for prompt, row, length in zip(PROMPTS, expected.tokens, expected.lengths, strict=True):
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        ask = Ask(
            np.array(prompt, np.int32), NEW, None, 0, (0, 0), False, False, None, frozenset(),
            pieces.put,
        )  # fmt: skip
        engine.submit([ask])
        told = [pieces.get(timeout=300)]
        while told[-1].finish is None:
            told.append(pieces.get(timeout=300))
        assert told[-1].finish == "length", told[-1]
        new = [token for piece in told for token in piece.tokens]
        assert new == np.asarray(row)[len(prompt) : length].tolist()
    engine.stop()


def commands() -> None:
    """A model that a command casts for its drafter is divided afterwards, and so is the cast."""
    commands = argparse.ArgumentParser()
    serve.add(commands.add_subparsers())
    cast = ["--quantize", "rtn", "--drafter", "draft-model", "--draft", "mxfp4"]
    options = commands.parse_args(["serve", "tiny-16bit", "--tensor", "2", *cast])
    one, many = (load_on(where, options) for where in (None, make_mesh(options)))
    assert dict(many[0].params.mesh.shape) == {"data": 1, "tensor": 2}
    _same(
        *(specjax.decode(t.params, PROMPTS, max_new_tokens=NEW, drafter=d) for t, d in (one, many))
    )


def likelihoods() -> None:
    """Likelihoods of given text are the same, in chunks and in one pass, with a quantized cache."""
    divided = shard(RTN, mesh(2, 4))
    texts = random_prompts((5, 70, 3, 7, 12), WIDE.vocab_size)
    pairs = [(text[:2], text[2:]) for text in texts]
    for options in ({"rows": 4}, {"rows": 2, "cache_bits": 8, "activation": "a4"}):
        _same(*(log_likelihoods(params, pairs, **options) for params in (RTN, divided)))
    _same(*(score_tokens(params, jnp.array([texts[1]])) for params in (RTN, divided)))


def bytes_per_device() -> None:
    """Weights and cache are divided: a device holds its share, and all norms and orders."""
    for name, params in MODELS.items():
        if name in ("odd", "nested"):
            continue  # some of their matrices stay whole, or become larger
        for data, tensor in ((1, 2), (1, 4), (1, 8), (2, 4)):
            divided = shard(params, mesh(data, tensor))
            held = device_bytes(divided)
            shared = sum(leaf.nbytes for path, leaf in jax.tree.leaves_with_path(params)
                         if path[-1].name.endswith(("norm", "order", "columns")))  # fmt: skip
            assert len(held) == data * tensor
            assert set(held.values()) == {shared + (params.nbytes - shared) // tensor}, (
                name,
                tensor,
            )
    state = start(divided, PROMPTS, max_new_tokens=NEW)
    cache = state.cache
    entries = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.keys, cache.values)))
    assert set(device_bytes((cache.keys, cache.values)).values()) == {entries // 8}


def nothing_gathers_weights() -> None:
    """The compiled program moves only activations, each smaller than the smallest weight."""
    smallest = min(linear.weight.nbytes for linear in RTN.linears())
    prompt = np.array([prompt[:3] for prompt in PROMPTS])
    assert not collectives(RTN, prompt, NEW)
    found = collectives(shard(RTN, mesh(2, 4)), prompt, NEW)
    assert found
    for collective in map(dict, found):
        assert collective["kind"] in ("all-gather", "all-reduce"), collective
        assert collective["array"].startswith(("f32[", "bf16[")), collective
        assert collective["bytes"] < smallest, (collective, smallest)


def restored_into_shards() -> None:
    """`load` gives every device the same arrays as `shard`."""
    for name in ("atom", "mxfp4-tied-biased"):
        with tempfile.TemporaryDirectory() as folder:
            specjax.save(MODELS[name], Path(folder) / "model")
            where = mesh(2, 4)
            loaded = specjax.load(Path(folder) / "model", mesh=where)
            expected = shard(MODELS[name], where)
            _same(loaded, expected)
            assert all(
                a.sharding.is_equivalent_to(b.sharding, a.ndim)
                for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True)
            )


def refusals() -> None:
    """A mesh that cannot divide the model is refused, and the message says what is accepted."""
    divided = shard(RTN, mesh(2, 4))
    few = random_model(dataclasses.replace(WIDE, num_kv_heads=2))
    draft = specjax.DraftModel(RTN)
    for call, sentence in (
        (
            lambda: shard(few, mesh(1, 8)),
            "tensor axis of 8 does not divide the model's 2 key-value",
        ),
        (lambda: specjax.load("tiny", mesh=mesh(1, 8)), "does not divide the model's 2 key-value"),
        (lambda: specjax.decode(divided, PROMPTS[:3]), "3 rows cannot be divided over a data axis"),
        (lambda: specjax.decode_many(divided, PROMPTS, rows=3), "3 rows cannot be divided"),
        (lambda: specjax.decode(divided, PROMPTS, drafter=draft), "over the same mesh, got none"),
        (lambda: shard(divided, mesh(1, 2)), "params are divided already"),
        (lambda: mesh(3, 4), "data=3 × tensor=4 needs 12 devices, and there are 8"),
        (lambda: mesh(0), "data must be at least 1, got 0"),
        (lambda: shard(RTN, jax.make_mesh((8,), ("x",))), 'mesh must have the axes "data" and'),
    ):
        try:
            call()
        except ValueError as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {sentence}")


CASES: dict[str, Callable[[], None]] = {
    "tensor 1": lambda: equal(RTN, 1, 1),
    "tensor 8": lambda: equal(RTN, 1, 8),
    "data 2 × tensor 4": lambda: equal(RTN, 2, 4),
    "quarot, 4-bit cache, tensor 8": lambda: equal(MODELS["quarot"], 1, 8, a4, cache_bits=4),
    "atom, 8-bit cache, 2 × 4": lambda: equal(MODELS["atom"], 2, 4, a4, cache_bits=8),
    "mxfp4, tied, biased, tensor 8": lambda: equal(MODELS["mxfp4-tied-biased"], 1, 8),
    "sizes that are not divided, tensor 8": lambda: equal(MODELS["odd"], 1, 8),
    "nested, 2 × 4": lambda: equal(MODELS["nested"], 2, 4),
    "nested, tensor 8": lambda: equal(MODELS["nested"], 1, 8),
    "plain, 2 × 4": lambda: equal(RTN, 2, 4, plain),
    "two levels, 2 × 4": lambda: equal(RTN, 2, 4, two_levels),
    "tree, 2 × 4": lambda: equal(RTN, 2, 4, spectra),
    "sampled, 4 × 2": lambda: equal(RTN, 4, 2, **SAMPLING),
    "translated, sampled, 2 × 4": lambda: equal(RTN, 2, 4, translated, **SAMPLING),
    "rounds one by one": rounds_one_by_one,
    "many prompts": many_prompts,
    "served": served,
    "commands": commands,
    "likelihoods": likelihoods,
    "bytes per device": bytes_per_device,
    "nothing gathers weights": nothing_gathers_weights,
    "restored into shards": restored_into_shards,
    "refusals": refusals,
}


def main() -> None:
    for name in sys.argv[1:] or CASES:
        error = None
        try:
            CASES[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"case": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
