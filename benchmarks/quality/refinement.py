"""Measures what refining a corpus by perplexity gains (SPECTRA, section 3.2).

The script counts the tokens that a look-up gains in text that the model wrote. Its datastores hold
all sequences of the same corpora, a random half or quarter, or those that the model finds least or
most surprising. No drafts are verified, because every drafter leads to the text of plain decoding.
Every look-up has the budget of REST, 64 nodes.

    python -m benchmarks.quality.refinement --json OUT
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import specjax
from benchmarks.quality.compression import KINDS
from benchmarks.support.common import pad, parser, table, text_prompts, write
from benchmarks.support.corpora import corpora, write_corpus
from specjax import Autoregressive, Datastore, Params, Retrieval, Sampling
from specjax.evaluation.corpus import score_sequences, tokenize
from specjax.generation.decoding import start
from specjax.speculation.state import DecodeState, Proposal


def main() -> None:
    options = _options()
    params, tokenizer = specjax.load(options.model), specjax.load_tokenizer(options.model)
    texts = [text for kind in KINDS for text in text_prompts(options.data, kind, options.prompts)]
    prompts = [tokenizer.encode(text)[: options.max_prompt] for text in texts]
    written = {
        "greedy": _written(params, prompts, None, options),
        "sampled": _written(params, prompts, Sampling(temperature=1.0), options),
    }
    sequences, shares, nats = _scored(params, tokenizer, options)
    rows = []
    for name, chosen in tqdm(_choices(shares).items(), file=sys.stderr):
        kept = [sequences[index] for index in np.flatnonzero(chosen)]
        store = Datastore.create(kept, params.config.vocab_size)
        row = {
            "datastore": name, "sequences": len(kept), "tokens": store.suffixes.shape[0],
            "nats": float(nats[chosen].mean()),
        }  # fmt: skip
        for decoding, state in written.items():
            gained = gained_per_prompt(params, Retrieval(store), state, options.max_new_tokens)
            row[decoding] = float(gained.mean())
            row[f"{decoding}_error"] = float(gained.std(ddof=1) / len(gained) ** 0.5)
        rows.append(row)
        write(options.json, rows)
    print(table(rows, list(rows[0])))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--model", default="tiny")
    add("--prompts", type=int, default=25, help="prompts per kind")
    add("--max-prompt", type=int, default=160, help="tokens used of each prompt")
    add("--max-new-tokens", type=int, default=128)
    add("--sequences", type=int, default=2000, help="texts per corpus")
    return parse.parse_args()


def _written(
    params: Params, prompts: list[list[int]], sampling: Sampling | None, options: Any
) -> DecodeState:
    """All prompts as before the first round, followed by the text of plain decoding."""
    tokens, lengths = pad(prompts, max(map(len, prompts)))
    key = None if sampling is None else jax.random.key(0)
    arguments: dict[str, Any] = {
        "prompt_lengths": lengths, "drafter": Autoregressive(), "sampling": sampling, "key": key,
        "max_new_tokens": options.max_new_tokens, "stop_tokens": (),
    }  # fmt: skip
    state = start(params, tokens, **arguments)
    result = specjax.decode(params, tokens, **arguments)
    return dataclasses.replace(state, tokens=result.tokens)


def _scored(
    params: Params, tokenizer: specjax.text.Tokenizer, options: Any
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Per sequence: its tokens, the share of its corpus that is less surprising, and its nats."""
    sequences: list[np.ndarray] = []
    shares, nats = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, texts in corpora(options.data, options.sequences).items():
            corpus = write_corpus(Path(folder, f"{name}.jsonl"), texts)
            own = tokenize(tokenizer, corpus, 256)
            nats.append(score_sequences(params, own, Path(folder, f"{name}.scores"), 8))
            shares.append(np.argsort(np.argsort(nats[-1], kind="stable")) / len(own))
            sequences += own
    return sequences, np.concatenate(shares), np.concatenate(nats)


def _choices(shares: np.ndarray) -> dict[str, np.ndarray]:
    """The sequences that each datastore holds, bool[sequences]."""
    chance = np.random.default_rng(0).random(len(shares))
    quarters = {
        f"{name} quarter": (shares >= 0.25 * index) & (shares < 0.25 * (index + 1))
        for index, name in enumerate(("least surprising", "second", "third", "most surprising"))
    }
    return {
        "all": shares >= 0,
        "a random half": chance < 0.5,
        "the less surprising half": shares < 0.5,
        "the more surprising half": shares >= 0.5,
        "a random quarter": chance < 0.25,
        **quarters,
    }


def gained_per_prompt(
    params: Params, drafter: Retrieval, state: DecodeState, new_tokens: int
) -> np.ndarray:
    """Tokens that a proposal gains at an average position of the text, f64[prompts]."""

    @jax.jit
    def propose(drafter: Retrieval, state: DecodeState) -> Proposal:
        return drafter.propose(params, state)[0]

    prompts = np.asarray(state.lengths)
    places = range(new_tokens - drafter.depth)
    total = np.zeros(len(prompts))
    for place in places:
        lengths = prompts + place
        proposal = propose(drafter, dataclasses.replace(state, lengths=lengths))
        following = lengths[:, None] + np.arange(drafter.depth)
        total += _gained(proposal, np.take_along_axis(np.asarray(state.tokens), following, axis=1))
    return total / len(places)


def _gained(proposal: Proposal, following: np.ndarray) -> np.ndarray:
    """The longest path of each row's tree that the text follows.

    following: int[B, depth], the next tokens of the text. Returns int[B].
    """
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.parents)
    meant = np.arange(tokens.shape[1]) < np.asarray(proposal.counts)[:, None]
    rows = np.arange(len(tokens))
    depths = np.zeros(tokens.shape, int)  # of the nodes that the text follows, else 0
    for node in range(tokens.shape[1]):
        root = parents[:, node] < 0
        above = np.where(root, 0, depths[rows, parents[:, node]])
        came = (root | (above > 0)) & meant[:, node]
        came &= tokens[:, node] == following[rows, above]
        depths[:, node] = np.where(came, above + 1, 0)
    return depths.max(axis=1)


if __name__ == "__main__":
    main()
