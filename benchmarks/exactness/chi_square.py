"""Tests whether sampled texts have exactly the target's distribution: 20,000 per drafter.

The script counts the first three tokens after a prompt; no constant draft is longer. The prompt is
real text, the model's likely continuation, and the text again, so that drafters without a model
have something to look up. The target's logits give the probability of every such text. `min_p`
keeps their number to a few thousand, and rare texts share one cell. If the counts follow the
probabilities, chi-square's p-value is uniform in 0 … 1; a value below 0.001 / (number of drafters)
is a failure. Every drafter draws from random numbers of its own, so the rows are independent tests,
and whether all p-values together are uniform is printed too (Kolmogorov-Smirnov). The same command
on the same commit goes on where it was stopped.

    python -m benchmarks.exactness.chi_square --draft DIRECTORY --json OUT
"""

from __future__ import annotations

import collections
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats
from tqdm import tqdm

import specjax
from benchmarks.support.common import kept_rows, parser, table, text_prompts, write
from benchmarks.support.drafter_table import model_drafters
from specjax import (
    Auto,
    Combined,
    Datastore,
    Drafter,
    DraftModel,
    LayerSkip,
    Lookahead,
    MultiLevel,
    NGram,
    Params,
    PromptLookup,
    Retrieval,
    Sampling,
    Spectra,
    TokenRecycling,
)
from specjax.drafting.costs import Costs
from specjax.model.kv_cache import KVCache
from specjax.model.transformer import forward
from specjax.speculation.penalties import Earlier
from specjax.speculation.sampling import probabilities

PLACES = 3
SAMPLING = Sampling(temperature=1.5, min_p=0.03, repetition_penalty=1.1)
EXPECTED = 10  # texts with a lower expected count share one cell
# Costs by which Auto drafts whenever it has something: the test must see its drafts.
DRAFTING = Costs(np.ones(4, np.float32), np.float32(0.01))


def main() -> int:
    options = _options()
    params = specjax.load(options.model)
    prompt = _prompt(params, options)
    layers = tuple(i for i in range(params.config.num_layers) if i % 4 != 3)
    drafters = model_drafters(
        params, specjax.load(options.draft), LayerSkip(layers, PLACES),
        small_length=PLACES, cast_length=PLACES, levels_length=PLACES,
    )  # fmt: skip
    integers, nested = specjax.quantize(params), specjax.quantize(params, "nested16", lm_head=True)
    cases: dict[str, tuple[Params, Drafter]] = {"plain": (params, specjax.Autoregressive())}
    cases |= {name: (params, drafter) for name, drafter in drafters.items()}
    cases |= {name: (params, drafter) for name, drafter in text_drafters(params, prompt).items()}
    cases |= {
        "plain, 4-bit target": (integers, specjax.Autoregressive()),
        "QSpec, 4-bit target": (integers, specjax.QSpec(3, "a4")),
        "QSpec, drafted tree, 4-bit target": (
            integers, specjax.DraftTree(specjax.QSpec(2, "a4"), width=2, nodes=6),
        ),
        "Auto, 4-bit target": (integers, specjax.Auto(DRAFTING, specjax.QSpec(7, "a4"))),
        "QSpec, nested target": (nested, specjax.QSpec(3, "a8")),
        "Auto, nested target": (nested, specjax.Auto(DRAFTING, specjax.QSpec(7, "a8"))),
    }  # fmt: skip
    seeds = {name: seed for seed, name in enumerate(cases)}
    cases = {name: cases[name] for name in options.drafters or cases}
    targets = (params, integers, nested)
    exact = {id(target): text_probabilities(target, prompt) for target in targets}
    rows = kept_rows(options.json)
    done = {row["drafter"] for row in rows}
    left = {name: case for name, case in cases.items() if name not in done}
    for name, (target, drafter) in tqdm(left.items(), file=sys.stderr):
        texts = sampled_texts(target, prompt, drafter, seeds[name], options)
        result = compare(texts, exact[id(target)])
        rows.append({"model": options.model, "drafter": name, "seed": seeds[name], **result})
        write(options.json, rows)
    print(table(rows, list(rows[0])))
    uniform = stats.kstest([row["p_value"] for row in rows], "uniform")
    print(f"\nall p-values beside a uniform distribution: p = {uniform.pvalue:.3f}")
    wrong = [row for row in rows if row["impossible"] or row["p_value"] < 1e-3 / len(rows)]
    return 1 if wrong else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny-16bit", help="a 16-bit model")
    add("--draft", required=True, help="a small model of the same tokenizer")
    add("--drafters", nargs="+", help="names, such as 'two levels'; default: all")
    add("--samples", type=int, default=20_000)
    add("--rows", type=int, default=500, help="samples per batch")
    add("--prompt", type=int, default=3, help="tokens of real text")
    return parse.parse_args()


def _prompt(params: Params, options: Any) -> list[int]:
    text = text_prompts(options.data, "arithmetic", 1)[0]
    first = specjax.load_tokenizer(options.model).encode(text)[: options.prompt]
    likely: tuple[int, ...] = ()
    for _ in range(3):  # the likely text depends on what precedes it
        texts = text_probabilities(params, [*first, *likely, *first])
        likely = max(texts, key=texts.__getitem__)
    return [*first, *likely, *first]


def text_drafters(params: Params, prompt: list[int]) -> dict[str, Drafter]:
    """Drafters without a model. The datastore holds the prompt."""
    datastore = Datastore.create([np.array(prompt)] * 2, params.config.vocab_size)
    core = Spectra(window=2, guesses=2, capacity=256)  # far more n-grams than one sample has
    cast = specjax.quantize(params, "mxfp4", lm_head=True)
    return {
        "prompt lookup": PromptLookup(4),
        "ANPD": NGram(4),
        "Lookahead, W = G = 2": Lookahead(window=2, guesses=2),
        "CORE, W = G = 2": core,
        "retrieval": Retrieval(datastore),
        "SPECTRA": Combined(core, Retrieval(datastore)),
        "token recycling": TokenRecycling(nodes=6, successors=3),
        "Auto": Auto(DRAFTING),
        "MXFP4 cast, ANPD below": MultiLevel(DraftModel(cast, 4, share_cache=True), NGram(2)),
        "MXFP4 cast, CORE below": MultiLevel(DraftModel(cast, 4, share_cache=True), core),
    }


def text_probabilities(params: Params, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every text of PLACES tokens that can follow the prompt."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PLACES):
        following = _distributions(params, prompt, list(texts))
        texts = {
            (*text, int(token)): share * float(row[token])
            for (text, share), row in zip(texts.items(), following, strict=True)
            for token in np.flatnonzero(row)
        }
    return texts


def _distributions(params: Params, prompt: list[int], texts: list[tuple[int, ...]]) -> np.ndarray:
    """The distribution of the next token after each text, f64[texts, V]."""
    rows = []
    for begin in range(0, len(texts), 64):
        tokens = jnp.array([[*prompt, *text] for text in texts[begin : begin + 64]])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        cache = KVCache.create(params.config, *tokens.shape)
        logits = forward(params, tokens, positions, cache)[0][:, -1]
        seen = jax.nn.one_hot(tokens, params.config.vocab_size, dtype=bool).any(axis=1)
        rows.append(np.asarray(probabilities(logits, SAMPLING, Earlier(seen)), np.float64))
    return np.concatenate(rows)


def sampled_texts(
    params: Params, prompt: list[int], drafter: Drafter, seed: int, options: Any
) -> np.ndarray:
    """int[samples, PLACES]."""
    stream = jax.random.key(seed)
    rows = jnp.broadcast_to(jnp.array(prompt), (options.rows, len(prompt)))
    texts = []
    for batch in range(-(-options.samples // options.rows)):
        result = specjax.decode(
            params, rows, max_new_tokens=PLACES, drafter=drafter, sampling=SAMPLING,
            key=jax.random.fold_in(stream, batch), stop_tokens=(),
        )  # fmt: skip
        texts.append(np.asarray(result.tokens[:, len(prompt) :]))
    return np.concatenate(texts)[: options.samples]


def compare(texts: np.ndarray, exact: dict[tuple[int, ...], float]) -> dict[str, Any]:
    """Chi-square of the counts, and how many texts have probability zero ("impossible")."""
    observed = collections.Counter(map(tuple, texts.tolist()))
    expected = np.array(list(exact.values())) * len(texts)
    counted = np.array([observed[text] for text in exact])
    rare = expected < EXPECTED
    expected = np.append(expected[~rare], expected[rare].sum())
    counted = np.append(counted[~rare], counted[rare].sum())
    kept = expected > 0
    expected = expected[kept] * counted[kept].sum() / expected[kept].sum()
    chi_square = stats.chisquare(counted[kept], expected)
    return {
        "samples": len(texts),
        "texts": len(exact),
        "cells": int(kept.sum()),
        "impossible": len(texts) - int(counted.sum()),
        "chi_square": float(chi_square.statistic),
        "p_value": float(chi_square.pvalue),
    }


if __name__ == "__main__":
    sys.exit(main())
