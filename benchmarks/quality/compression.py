"""Counts tokens per verification for drafters without a model: SPECTRA's table 2, figures 3 and 6.

Every drafter decodes the same real prompts of four kinds: greedily, with each output compared with
plain decoding's, and sampled with several seeds. Further parts measure the sources of accepted
tokens, guesses as the last level below a draft model, and the choices that the paper leaves open.

    python -m benchmarks.quality.compression --json OUT

The datastores hold no prompts, and equally many sequences of GSM8K's training set, of Python's
standard library and of books. Refinement keeps those that the model finds least surprising; without
refinement the first after shuffling are kept.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.support.common import pad, parser, table, text_prompts, write
from benchmarks.support.corpora import corpora, write_corpus
from specjax import (
    Autoregressive,
    Combined,
    Datastore,
    Drafter,
    DraftModel,
    Lookahead,
    MultiLevel,
    NGram,
    Params,
    PromptLookup,
    QSpec,
    Retrieval,
    Sampling,
    Spectra,
)
from specjax.evaluation.corpus import build_datastore
from specjax.generation.decoding import start
from specjax.speculation.rounds import step
from specjax.speculation.state import DecodeState, Stats

KINDS = ("arithmetic", "python", "chat", "prose")
Rows = Iterator[dict[str, Any]]


class Setup(NamedTuple):
    """The inputs of every part. kinds and prompts have equal length."""

    params: Params
    kinds: list[str]
    prompts: list[list[int]]
    refined: Datastore
    unrefined: Datastore
    options: Any

    def subset(self, per_kind: int) -> Setup:
        """The first few prompts of each kind."""
        chosen = [i for i in range(len(self.kinds)) if i % self.options.prompts < per_kind]
        kinds, prompts = ([values[i] for i in chosen] for values in (self.kinds, self.prompts))
        return self._replace(kinds=kinds, prompts=prompts)


class Decoded(NamedTuple):
    """The result of `decode`.

    tokens: int32[prompts, W].
    stats, levels: per prompt.
    gained: int32[rounds], the tokens of all prompts together.
    seen: per round, the result of `look` before it, and the tokens that it gained.
    """

    tokens: np.ndarray
    stats: Stats
    levels: tuple[Stats, ...]
    gained: np.ndarray
    seen: list[Any]


def main() -> int:
    options = _options()
    params, tokenizer = specjax.load(options.model), specjax.load_tokenizer(options.model)
    texts = [
        (kind, text) for kind in KINDS for text in text_prompts(options.data, kind, options.prompts)
    ]
    prompts = [tokenizer.encode(text)[: options.max_prompt] for _, text in texts]
    setup = Setup(
        params,
        [kind for kind, _ in texts],
        prompts,
        *_datastores(params, tokenizer, options),
        options=options,
    )
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        own = setup if part == "greedy" else setup.subset(options.fewer)
        for row in tqdm(PARTS[part](own), desc=part, file=sys.stderr):
            rows.append({"part": part, **row})
            write(options.json, rows)
    for part in options.parts:
        shown = [row for row in rows if row["part"] == part]
        print(table(shown, [name for name in shown[0] if name != "by_step"]))
    differing = sum(row.get("differing", 0) for row in rows)
    print(f"\n{differing} outputs differ from plain decoding's")
    return 1 if differing else 0


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny", help="a 4-bit model")
    add("--wide", default="tiny-16bit", help="a 16-bit model, whose cast drafts for it")
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--drafters", nargs="+", help="names, such as CORE; default: all")
    add("--prompts", type=int, default=24, help="prompts per kind")
    add("--fewer", type=int, default=8, help="prompts per kind for all parts except greedy")
    add("--max-prompt", type=int, default=160, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=128)
    add("--batch", type=int, default=8)
    add("--seeds", type=int, default=3, help="sampled texts per prompt")
    add("--temperature", type=float, default=1.0)
    add("--sequences", type=int, default=2000, help="sequences per corpus")
    add("--keep", type=int, default=1000, help="sequences per corpus that a datastore holds")
    add("--stores", type=Path, help="directory that keeps the datastores")
    return parse.parse_args()


def drafters(setup: Setup) -> dict[str, Drafter]:
    """The baselines, SPECTRA and its ablations, named as in the paper's table 2."""
    core, rest, retrieval = Spectra(), Retrieval(setup.unrefined), Retrieval(setup.refined)
    named: dict[str, Drafter] = {
        "plain": Autoregressive(),
        "prompt lookup": PromptLookup(),
        "ANPD": NGram(),
        "Lookahead": Lookahead(),
        "REST": rest,
        "Lookahead + REST": Combined(Lookahead(), rest),
        "CORE": core,
        "CORE, no forward dictionary": dataclasses.replace(core, forward=False),
        "CORE, no backward dictionary": dataclasses.replace(core, backward=False),
        "CORE, no sub-n-grams": dataclasses.replace(core, parts=False),
        "RETRIEVAL": retrieval,
        "SPECTRA": Combined(core, retrieval),
        "SPECTRA, no perplexity refinement": Combined(core, rest),
    }
    return {name: named[name] for name in setup.options.drafters or named}


def _greedy(setup: Setup) -> Rows:
    """All prompts. In batches, some prompts are also decoded one at a time."""
    batch = setup.options.batch
    runs = [(setup, batch)] if batch == 1 else [(setup, batch), (setup.subset(2), 1)]
    plain = [decode(own, Autoregressive(), batch=rows) for own, rows in runs]
    for name, drafter in drafters(setup).items():
        done = [decode(own, drafter, batch=rows) for own, rows in runs]
        yield {
            "drafter": name, "batch": batch, **_ratios(setup, done[0]),
            "compared": sum(len(own.prompts) for own, _ in runs),
            "differing": sum(map(_differing, done, plain)),
            "by_step": np.cumsum(done[0].gained).tolist(),
        }  # fmt: skip


def _sampled(setup: Setup) -> Rows:
    """Means over the seeds. `error` is the standard error of `mean` over the seeds."""
    seeds = range(setup.options.seeds)
    for name, drafter in drafters(setup).items():
        yield {"drafter": name, **_mean_of_seeds(setup, drafter, seeds)}


def _levels(setup: Setup) -> Rows:
    """CORE below a draft. `draft_passes` is the draft model's passes per generated token."""
    wide = specjax.load(setup.options.wide)
    cast = specjax.quantize(wide, "mxfp4", lm_head=True)
    drafts = {
        "QSpec": (setup.params, QSpec(8)),
        "MXFP4 cast": (wide, DraftModel(cast, 8, share_cache=True)),
    }
    for name, (target, draft) in drafts.items():
        own = setup._replace(params=target)
        plain = decode(own, Autoregressive())
        for label, drafter in (
            (name, draft),
            (f"{name}, CORE below", MultiLevel(draft, Spectra())),
        ):
            done = decode(own, drafter)
            below = [int(level.rounds.sum()) for level in done.levels]
            passes = sum(below) if below else draft.draft_length * int(done.stats.rounds.sum())
            yield {
                "drafter": label, **_ratios(own, done),
                "draft_passes": passes / int(done.stats.generated.sum()),
                "compared": len(own.prompts), "differing": _differing(done, plain),
            }  # fmt: skip


def _sources(setup: Setup) -> Rows:
    """Guessed and accepted tokens of each source in a run of SPECTRA, per round."""
    core, store = Spectra(), Retrieval(setup.refined)
    drafter = Combined(core, store)

    @jax.jit
    def look(state: DecodeState) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Sequences and lengths by source."""
        table = drafter.propose(setup.params, state)[1].draft.first.table
        sequences, lengths = dataclasses.replace(core, backward=False).guess(table, state)
        whole = lengths == core.ngram - 1
        return {
            "backward": dataclasses.replace(core, forward=False).guess(table, state),
            "forward": (sequences, jnp.where(whole, lengths, 0)),
            "forward, sub-n-grams": (sequences, jnp.where(whole, 0, lengths)),
            "retrieval": store.continuations(state),
        }

    sampled = Sampling(temperature=setup.options.temperature)
    for name, sampling in (("greedy", None), ("sampled", sampled)):
        totals: dict[str, np.ndarray] = {}
        for guesses, emitted, gained in decode(setup, drafter, sampling, look=look).seen:
            for source, (sequences, lengths) in guesses.items():
                for row in np.flatnonzero(gained):
                    found = _hits(sequences[row], lengths[row], emitted[row, : gained[row]])
                    totals[source] = totals.get(source, 0) + np.array([1, *found])
        for source, (rounds, guessed, accepted) in totals.items():
            yield {
                "source": source, "decoding": name, "guessed": guessed / rounds,
                "accepted": accepted / rounds, "acceptance_rate": accepted / max(guessed, 1),
            }  # fmt: skip


def _hits(sequences: np.ndarray, lengths: np.ndarray, emitted: np.ndarray) -> tuple[int, int]:
    """Tokens that a source guessed, shared ones counted once, and how many were generated."""
    guessed = {
        tuple(sequence[:end])
        for sequence, length in zip(sequences.tolist(), lengths, strict=True)
        for end in range(1, length + 1)
    }
    came = [tuple(emitted[:end].tolist()) for end in range(1, len(emitted) + 1)]
    return len(guessed), sum(path in guessed for path in came)


def _choices(setup: Setup) -> Rows:
    """SPECTRA-CORE with other options: greedy, and one sampled text per prompt."""
    for fields in CHOICES:
        drafter = Spectra(**fields)
        greedy = _ratios(setup, decode(setup, drafter))
        sampled = _mean_of_seeds(setup, drafter, range(1))
        name = ", ".join(f"{name} = {value}" for name, value in fields.items()) or "CORE"
        yield {
            "drafter": name, "draft_length": drafter.draft_length, "greedy": greedy["mean"],
            "sampled": sampled["mean"], "drafted": sampled["drafted"],
        }  # fmt: skip


def decode(
    setup: Setup,
    drafter: Drafter,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    batch: int | None = None,
    look: Callable[[DecodeState], Any] | None = None,
) -> Decoded:
    """Decodes all prompts round by round. A row's key belongs to its prompt, not to its batch."""
    batch = setup.options.batch if batch is None else batch
    width, count = max(map(len, setup.prompts)), len(setup.prompts)
    finished, gained, seen = [], np.zeros(setup.options.max_new_tokens, int), []
    for begin in range(0, count, batch):
        numbers = np.arange(begin, begin + batch) % count  # the last batch starts over
        tokens, lengths = pad([setup.prompts[i] for i in numbers], width)
        keys = None
        if sampling is not None:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
        state = start(
            setup.params, tokens, prompt_lengths=lengths, drafter=drafter, sampling=sampling,
            key=keys, max_new_tokens=setup.options.max_new_tokens, stop_tokens=(),
        )  # fmt: skip
        own = min(batch, count - begin)
        for number in range(setup.options.max_new_tokens):
            before = None if look is None else jax.tree.map(np.asarray, look(state))
            state, verified = step(setup.params, state, drafter)
            came = np.asarray(verified.count)
            gained[number] += came[:own].sum()
            seen.append((before, np.asarray(verified.emitted), came))
            if np.all(state.finished):
                break
        result = state.tokens, state.stats, drafter.levels(state.draft)
        finished.append(jax.tree.map(lambda x: np.asarray(x)[:own], result))  # noqa: B023
    merged = jax.tree.map(lambda *parts: np.concatenate(parts), *finished)
    return Decoded(*merged, gained=gained, seen=seen)


def _ratios(setup: Setup, done: Decoded) -> dict[str, float]:
    """Tokens per verification by kind and on average, and tokens drafted per round."""
    kinds = np.array(setup.kinds)
    ratios = {
        kind: float(
            done.stats.generated[kinds == kind].sum() / done.stats.rounds[kinds == kind].sum()
        )
        for kind in KINDS
    }
    drafted = float(done.stats.drafted.sum() / done.stats.rounds.sum())
    return {**ratios, "mean": float(np.mean(list(ratios.values()))), "drafted": drafted}


def _mean_of_seeds(setup: Setup, drafter: Drafter, seeds: Sequence[int]) -> dict[str, float]:
    sampling = Sampling(temperature=setup.options.temperature)
    found = [_ratios(setup, decode(setup, drafter, sampling, seed=seed)) for seed in seeds]
    means = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
    spread = np.std([each["mean"] for each in found], ddof=1) if len(found) > 1 else np.nan
    return {**means, "error": float(spread / len(found) ** 0.5)}


def _differing(done: Decoded, plain: Decoded) -> int:
    return int((done.tokens != plain.tokens).any(axis=1).sum())


def _datastores(params: Params, tokenizer: specjax.text.Tokenizer, options: Any) -> list[Datastore]:
    """Datastores with and without refinement, from the same texts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.stores or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        stores = []
        for refine in (True, False):
            sequences: list[np.ndarray] = []
            for name, texts in corpora(options.data, options.sequences).items():
                out = folder / f"{name}-{options.sequences}-{options.keep}-{refine}"
                if not out.exists():
                    corpus = write_corpus(folder / f"{name}.jsonl", texts)
                    build_datastore(
                        params, tokenizer, corpus, out, keep=options.keep, refine=refine
                    )
                tokens = np.asarray(Datastore.load(out).tokens)
                ends = np.flatnonzero(tokens == params.config.vocab_size)
                sequences += [
                    part[part < params.config.vocab_size] for part in np.split(tokens, ends)
                ]
            stores.append(Datastore.create(sequences, params.config.vocab_size))
        return stores


CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"refine": 0.0},
    {"refine": 0.3},
    {"refine": 1.0},
    {"text": False},
    {"backward_length": 4},
    {"backward_length": 20},
    {"ngram": 4},
    {"ngram": 7},
    {"window": 7, "guesses": 7},
    {"window": 2, "guesses": 2},
    {"window": 30, "guesses": 30},
)
PARTS: dict[str, Callable[[Setup], Rows]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "levels": _levels,
    "sources": _sources,
    "choices": _choices,
}

if __name__ == "__main__":
    sys.exit(main())
