"""Trains from scratch the small Llama that ships with the package.

Tests and examples need a real model: it must write English, its draft and target must sometimes
agree, and it must be small enough for the repository. This script trains one, on a CPU in about
three hours or on a GPU in minutes, from public-domain books, GSM8K's training part and Python's own
library (see tiny_corpus.py). A run may be killed at any moment and resumed with the same command:
the order of the data and the learning rate depend on the step number alone.

    python -m checkpoints_tools.train_tiny --data ../shared/data --out runs/tiny
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from specjax.files import interruption

if __name__ == "__main__":
    interruption.listen("train_tiny")  # here: the imports below take seconds

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from checkpoints_tools import tiny_corpus
from checkpoints_tools.tiny_corpus import KINDS, RunError
from checkpoints_tools.tiny_model import PRESETS, ArrayTree, Llama, LlamaConfig, export_hf
from specjax.files.outputs import write_whole

# Kinds of text among 20 consecutive rows. Novels teach the language. A model remembers best the
# text of the decay, so the decay favors the simple stories and word problems that it should write.
ROWS_OF_20 = {"tales": 8, "prose": 4, "gsm8k": 5, "python": 3}
DECAY_ROWS_OF_20 = {"tales": 9, "prose": 1, "gsm8k": 6, "python": 4}
DECAY_SHARE = 0.25
SEED = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings that determine the parameters after a given number of steps."""

    steps: int
    rows: int
    tokens: int
    optimizer: str
    warmup: int = 100
    peak: float = 5e-3
    embedding_peak: float = 3e-3

    def decay_start(self) -> int:
        return self.steps - int(self.steps * DECAY_SHARE)

    def schedule(self, peak: float) -> optax.Schedule:
        """Warm-up, then a constant rate, then a linear decay to zero."""

        def rate(step: jax.Array) -> jax.Array:
            left = (self.steps - step) / max(1, self.steps - self.decay_start())
            return peak * jnp.clip(jnp.minimum((step + 1) / self.warmup, left), 0.0, 1.0)

        return rate


class Batches:
    """Rows of tokens for any step. Each epoch of each kind has its own fixed random order."""

    def __init__(self, streams: dict[str, np.ndarray], plan: Plan, mixture: dict[str, int]) -> None:
        self.streams, self.plan, self.mixture = streams, plan, mixture
        pattern = [kind for kind, count in mixture.items() for _ in range(count)]
        self.pattern = list(np.random.default_rng(SEED).permutation(pattern))
        self.order = lru_cache(maxsize=2 * len(KINDS))(self._order)

    def _order(self, kind: str, epoch: int) -> np.ndarray:
        """The starts of all windows of one epoch. A random offset varies the cuts per epoch."""
        random = np.random.default_rng([SEED, KINDS.index(kind), epoch])
        offset = random.integers(self.plan.tokens)
        count = (len(self.streams[kind]) - 1) // self.plan.tokens - 1
        if count < 1:
            raise RunError(f"the {kind} text is shorter than two windows of tokens")
        return offset + self.plan.tokens * random.permutation(count)

    def row(self, index: int) -> np.ndarray:
        turn, place = divmod(index, len(self.pattern))
        kind = self.pattern[place]
        number = turn * self.mixture[kind] + self.pattern[:place].count(kind)
        per_epoch = len(self.order(kind, 0))
        start = self.order(kind, number // per_epoch)[number % per_epoch]
        return self.streams[kind][start : start + self.plan.tokens + 1]

    def __call__(self, step: int) -> np.ndarray:
        """int32[B, T + 1]: the tokens of a step, and one more to predict."""
        first = step * self.plan.rows
        rows = [self.row(index) for index in range(first, first + self.plan.rows)]
        return np.stack(rows).astype(np.int32)


def make_optimizer(plan: Plan) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    if plan.optimizer == "adamw":
        update = optax.adamw(plan.schedule(plan.embedding_peak), b2=0.98, weight_decay=0.1)
    else:
        update = optax.contrib.muon(
            plan.schedule(plan.peak),
            weight_decay=0.05,
            adam_b2=0.98,
            adam_learning_rate=plan.schedule(plan.embedding_peak),
            muon_weight_dimension_numbers=layer_matrices,
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), update)


def layer_matrices(params: ArrayTree) -> ArrayTree:
    """Muon's axes for every kernel [in, out] of the layers, None for everything else."""
    axes = optax.contrib.MuonDimensionNumbers()
    chosen: ArrayTree = jax.tree.map_with_path(
        lambda path, leaf: axes if path[-1].key == "kernel" else None, params
    )
    return chosen


def mean_loss(model: Llama, params: ArrayTree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Next-token cross-entropy in nats; inputs and targets are [B, T]."""
    logits = model.apply({"params": params}, inputs)  # [B, T, V]
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


@partial(jax.jit, static_argnums=(0, 1, 4), donate_argnums=2)
def train_step(
    model: Llama,
    optimizer: optax.GradientTransformation,
    state: ArrayTree,
    rows: jax.Array,
    pieces: int,
) -> tuple[ArrayTree, jax.Array]:
    """One update from rows, int32[B, T + 1], each cut into `pieces` shorter contexts."""
    batch, width = rows.shape[0] * pieces, (rows.shape[1] - 1) // pieces
    inputs = rows[:, :-1].reshape(batch, width)
    targets = rows[:, 1:].reshape(batch, width)
    loss, grads = jax.value_and_grad(partial(mean_loss, model))(state["params"], inputs, targets)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


eval_loss = jax.jit(mean_loss, static_argnums=0)


def validate(model: Llama, params: ArrayTree, stream: np.ndarray, tokens: int, rows: int) -> float:
    """Mean loss over at most `rows` consecutive windows of a validation stream."""
    count = min(rows, (len(stream) - 1) // tokens)
    starts = [i * tokens for i in range(max(1, count))]
    losses = []
    for start in starts:
        window = stream[start : start + tokens + 1].astype(np.int32)[None]
        losses.append(float(eval_loss(model, params, window[:, :-1], window[:, 1:])))
    return float(np.mean(losses))


class TrainingRun:
    """A training run in one folder: tokens, checkpoints, log and export."""

    def __init__(self, config: LlamaConfig, plan: Plan, out: Path) -> None:
        self.config, self.plan, self.out = config, plan, out
        arrays = np.load(out / "tokens.npz")
        streams = {kind: arrays[f"train_{kind}"] for kind in KINDS}
        self.stable = Batches(streams, plan, ROWS_OF_20)
        self.decay = Batches(streams, plan, DECAY_ROWS_OF_20)
        self.validation = {kind: arrays[f"validation_{kind}"] for kind in KINDS}
        self.validation_bytes = {kind: int(arrays[f"bytes_{kind}"]) for kind in KINDS}
        self.model, self.optimizer = Llama(config), make_optimizer(plan)
        self.manager = ocp.CheckpointManager(
            (out / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2,
                enable_async_checkpointing=False,
            ),
        )
        self.step, self.state = self._restore()

    def _fresh_state(self) -> ArrayTree:
        tokens = jnp.zeros((1, 8), jnp.int32)
        params = self.model.init(jax.random.key(SEED), tokens)["params"]
        return {"params": params, "opt_state": self.optimizer.init(params)}

    def _restore(self) -> tuple[int, ArrayTree]:
        step = self.manager.latest_step()
        if step is None:
            return 0, jax.jit(self._fresh_state)()
        like = jax.eval_shape(self._fresh_state)
        return step, self.manager.restore(step, args=ocp.args.StandardRestore(like))

    def save(self) -> None:
        if self.manager.latest_step() != self.step:
            self.manager.save(self.step, args=ocp.args.StandardSave(self.state))
        export_hf(self.config, self.state["params"], self.out / "tokenizer.json", self.out / "hf")

    def losses(self, rows: int) -> dict[str, float]:
        params, tokens = self.state["params"], self.plan.tokens
        return {
            kind: round(validate(self.model, params, stream, tokens, rows), 4)
            for kind, stream in self.validation.items()
        }

    def summary(self) -> dict[str, dict[str, float]]:
        """Loss over all validation text, per token and in bits per byte (for any tokenizer)."""
        losses = self.losses(rows=10_000)
        bits = {
            kind: round(
                loss * len(self.validation[kind]) / self.validation_bytes[kind] / np.log(2), 4
            )
            for kind, loss in losses.items()
        }
        return {"validation": losses, "bits_per_byte": bits}

    def log(self, record: dict[str, Any]) -> None:
        tokens = self.step * self.plan.rows * self.plan.tokens
        line = json.dumps({"step": self.step, "tokens": tokens, **record})
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def train(self, stop_at: int, minutes: float, save_every: int, eval_every: int) -> None:
        """Trains until step `stop_at` or until the time is over, then saves."""
        start, recent = time.monotonic(), []
        while self.step < stop_at and time.monotonic() - start < 60 * minutes:
            decaying = self.step >= self.plan.decay_start()
            rows = (self.decay if decaying else self.stable)(self.step)
            # Short contexts are cheaper. Only the late positions need long contexts.
            pieces = 1 if decaying else 2
            self.state, loss = train_step(self.model, self.optimizer, self.state, rows, pieces)
            self.step += 1
            recent.append(loss)
            if self.step % 20 == 0:
                seconds = round(time.monotonic() - start, 1)
                self.log({"loss": round(float(np.mean(recent)), 4), "seconds": seconds})
                recent = []
            if self.step % eval_every == 0:
                self.log({"validation": self.losses(rows=64)})
            if self.step % save_every == 0:
                self.save()
        self.save()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_tiny", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with texts/ and prompts/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--steps", type=int, default=6200, help="the last quarter is the decay")
    parser.add_argument("--stop-at", type=int, help="stop after this step; a later run resumes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens per step")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=300)
    parser.add_argument("--export", action="store_true", help="only export the last checkpoint")
    return parser.parse_args(argv)


def prepare_tokens(options: argparse.Namespace) -> None:
    """Tokenizes the text, unless this run has done so before."""
    if not (options.out / "tokens.npz").exists():
        documents = tiny_corpus.read_documents(options.data)
        tiny_corpus.build_tokens(documents, PRESETS[options.preset].vocab_size, options.out)


def check_same_run(options: argparse.Namespace) -> None:
    """Raises RunError if the folder's checkpoints were made with other settings."""
    path = options.out / "run.json"
    settings = {name: getattr(options, name) for name in ("preset", "rows", "optimizer")}
    if not path.exists():
        write_whole(path, json.dumps(settings) + "\n")
    elif (before := json.loads(path.read_text(encoding="utf-8"))) != settings:
        raise RunError(f"{options.out} holds a run with other settings: {before}")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    config = PRESETS[options.preset]
    plan = Plan(options.steps, options.rows, config.max_position_embeddings, options.optimizer)
    try:
        prepare_tokens(options)
        check_same_run(options)
        run = TrainingRun(config, plan, options.out)
        if options.export:
            run.save()
        else:
            stop_at = min(options.stop_at or options.steps, options.steps)
            run.train(stop_at, options.minutes, options.save_every, options.eval_every)
            run.log(run.summary())
    except RunError as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    interruption.end(main())
