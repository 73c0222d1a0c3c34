"""The costs of passes on this machine, measured once per model and batch size and kept on disk.

`Auto` weighs drafts by these costs. A file tells what it was measured on; one that is damaged, or
of another machine, model or version, is measured again, and so is one of an hour ago when the cores
were busy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.activations import Activation
from pallas_kernels.cpu.sources import digest
from pallas_kernels.settings import own_settings
from specjax.drafting.auto import Auto
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.costs import WIDTHS, Costs
from specjax.drafting.qspec import QSpec
from specjax.files.machine import CoreTimes, machine
from specjax.files.outputs import write_whole
from specjax.files.user_cache import kept_files
from specjax.model.kv_cache import KVCache
from specjax.model.params import Params
from specjax.model.room import check_cache
from specjax.speculation.drafter import Drafter
from specjax.speculation.rounds import step
from specjax.speculation.state import DecodeState, Stats
from specjax.speculation.timing import Timed, relative, seconds, verify_repeatedly
from specjax.version import __version__

_LEAST_BYTES = 32_000_000  # a smaller model is decoded faster than it is measured
# Tokens in the cache while passes are timed: never more than a decode's own.
_CONTEXTS = (128, 512, 2048, 4096, 8192, 16384, 32768, 65536)
_OWN = QSpec(WIDTHS[-1], window=512)  # drafts with the model's cheap reading
_NEVER = 1e-30  # probability that a draft's token hardly falls below
_TURNS = 5
_LOOK_ON_CPUS = 0.005  # a pass's share: it was measured as 0 to 0.03, mostly noise
_LONG_LOOK = 0.03  # for `Costs.loops`
_CHEAP = 1 / 4  # of a look, for `Costs.least`: about what the choice among the widths takes
_NEVER_PAYS = Costs(np.array([1, *[1e9] * (len(WIDTHS) - 1)], np.float32), np.float32(1e9))
_LIKELY = 0.95  # an acceptance that the model's cheap reading may have
# Waiting for a core per second of running. Two cores: 0.1 to 0.2 alone, 0.7 beside one process
# that wants a core, 1.6 beside two.
_BUSY = 0.4
_BUSY_SECONDS = 3600  # for which costs hold that were measured on busy cores


class Point(NamedTuple):
    """The decoding that costs belong to: rows at a time, bits per entry of the KV cache, and tokens
    of a prompt."""

    rows: int
    cache_bits: int = 16
    context: int = _CONTEXTS[0]

    @property
    def slots(self) -> int:
        """KV slots per row while passes are timed."""
        return self.context + 2 * WIDTHS[-1]


class _Kept(NamedTuple):
    """Costs, and the time until which they hold, in seconds since the epoch."""

    costs: Costs
    until: float = math.inf

    @property
    def holds(self) -> bool:
        return time.time() < self.until


_log = logging.getLogger(__name__)
_measured: dict[str, _Kept] = {}  # by description, in this process
# Describing a model takes a while, so its costs are also found by the object.
_of_model: dict[tuple[int, Point], tuple[weakref.ref[Params], _Kept]] = {}


def settled(
    drafter: Auto,
    params: Params,
    rows: int,
    cache_bits: int,
    activation: Activation,
    context: int,
) -> Auto:
    """Returns the drafter with costs, and with the model's cheap reading where it may pay.

    Args:
      drafter: costs and a draft that it has stay.
      params: the model.
      rows: the batch size.
      cache_bits: bits per entry of the KV cache.
      activation: precision of the target; the model's own drafts need a cheaper one.
      context: tokens of a prompt.
    """
    if drafter.costs is not None:
        return drafter
    costs = costs_of(params, rows, cache_bits, context)
    draft = drafter.draft
    if draft is None and params.quantized and activation == "a16" and _may_pay(costs):
        draft = _OWN
    return dataclasses.replace(drafter, costs=costs, draft=draft)


def settled_for_each(
    drafter: Auto,
    params: Params,
    counts: Sequence[int],
    cache_bits: int,
    activation: Activation,
    context: int,
) -> dict[int, Auto]:
    """`settled` for each of some ascending batch sizes, which may take turns on one state.

    Every eighth power of two and the last are measured. The costs between follow from them.
    """
    if drafter.costs is not None:
        return dict.fromkeys(counts, drafter)
    measured = [rows for rows in counts if rows in (counts[-1], 1, 8, 64, 512)]
    autos = {
        rows: settled(drafter, params, rows, cache_bits, activation, context) for rows in measured
    }
    # Each of them can draft with what may pay for one of them.
    draft = next((auto.draft for auto in autos.values() if auto.draft is not None), None)
    for rows in counts:
        if rows not in autos:
            narrow, wide = (
                max(n for n in measured if n < rows),
                min(n for n in measured if n > rows),
            )
            few, many = autos[narrow].costs, autos[wide].costs
            assert few is not None and many is not None
            costs = few.for_more(wide / narrow, many, rows / narrow)
            autos[rows] = dataclasses.replace(drafter, costs=costs)
    return {rows: dataclasses.replace(autos[rows], draft=draft) for rows in counts}


def costs_of(params: Params, rows: int, cache_bits: int = 16, context: int = _CONTEXTS[0]) -> Costs:
    """Returns the costs of passes over a batch: measured before, measured now, or estimated.

    A batch that memory cannot hold while its passes are timed has the costs of half as many rows.
    A small model's, one's that is divided over a mesh, and those inside `jax.jit` that were not
    measured before are estimated.
    """
    at = Point(_like(rows), cache_bits, _like_context(params, context))
    place = id(params), at
    known = _of_model.get(place)
    if known is not None and known[0]() is params and known[1].holds:
        return known[1].costs
    found = _find_costs(params, at)
    _of_model[place] = weakref.ref(params, lambda _: _of_model.pop(place, None)), found
    return found.costs


def calibrate(
    params: Params, rows: int, cache_bits: int = 16, context: int = _CONTEXTS[0]
) -> Costs:
    """Measures the costs of passes over a batch anew, and keeps them in place of older ones.

    Args:
      params: the model.
      rows: the batch size; up to the next power of two, batch sizes share a measurement.
      cache_bits: bits per entry of the KV cache.
      context: tokens of a prompt; from one of `_CONTEXTS` up to the next, they share a measurement.

    Raises ValueError for a model whose costs are estimated, or rows that memory cannot hold.
    """
    if params.mesh is not None:
        raise ValueError("params must not be divided over a mesh: costs there are estimated")
    if params.nbytes < _LEAST_BYTES:
        raise ValueError(
            f"params must have at least {_LEAST_BYTES} bytes, got {params.nbytes}: costs of a "
            "smaller model are estimated"
        )
    at = Point(_like(rows), cache_bits, _like_context(params, context))
    check_cache(params.config, at.rows, at.slots, cache_bits)
    measured = _measure(params, at, _description(params, at))
    _of_model.clear()
    return measured.costs


def _like(rows: int) -> int:
    """The batch size whose measurement `rows` shares."""
    return 1 << (rows - 1).bit_length()


def _like_context(params: Params, context: int) -> int:
    """The context whose measurement one of so many tokens shares."""
    shorter = max((each for each in _CONTEXTS if each <= context), default=_CONTEXTS[0])
    return min(shorter, params.config.max_position_embeddings - 2 * WIDTHS[-1])


def _find_costs(params: Params, at: Point) -> _Kept:
    if params.mesh is not None or params.nbytes < _LEAST_BYTES:
        return _Kept(Costs.usual(at.rows))
    described = _description(params, at)
    name = _name(described)
    if name not in _measured or not _measured[name].holds:
        place = kept_files("costs")
        found = None if place is None else _read(place / f"{name}.json", described)
        if found is None:
            if isinstance(jnp.zeros(()) + params.final_norm, jax.core.Tracer):
                return _Kept(Costs.usual(at.rows))
            if at.rows > 1 and not _fits(params, at):
                return _find_costs(params, at._replace(rows=at.rows // 2))
            _log.info("measuring once what drafting costs on this machine: a few seconds")
            return _measure(params, at, described)
        _measured[name] = found
    return _measured[name]


def _fits(params: Params, at: Point) -> bool:
    """Whether memory holds the cache to measure with, of up to twice the decode's rows."""
    try:
        check_cache(params.config, at.rows, at.slots, at.cache_bits)
    except ValueError:
        return False
    return True


def _measure(params: Params, at: Point, described: str) -> _Kept:
    """Measures costs, and keeps them in this process and on disk."""
    before, name = CoreTimes(), _name(described)
    costs = measure_costs(params, at)
    busy = CoreTimes().waited_since(before) > _BUSY
    if busy:
        _log.warning("the cores were busy, so the costs of drafting hold for an hour only")
    place = kept_files("costs")
    if place is not None:
        _write(place / f"{name}.json", described, costs, busy)
    _measured[name] = _Kept(costs, time.time() + _BUSY_SECONDS if busy else math.inf)
    return _measured[name]


def _name(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def measure_costs(params: Params, at: Point) -> Costs:
    """Times the passes that `Auto` chooses among, in turns; a few seconds."""
    holder = [_state(params, at)]

    def verification(drafts: int) -> partial[float]:
        def program(state: DecodeState, repeats: int) -> Timed:
            timed: Timed = verify_repeatedly(params, state, repeats, drafts, "a16", None)
            return timed

        return partial(seconds, program, holder)

    passes = [verification(width) for width in WIDTHS]
    own = _OWN if params.quantized else None
    drafts = [partial(_draft_repeatedly, params)] if own else []
    rounds = [
        partial(_decode_repeatedly, params, drafter=drafter)
        for drafter in (Autoregressive(), Auto(_NEVER_PAYS, own))
        if _host_decides()
    ]
    others = [partial(seconds, program, holder) for program in (*drafts, *rounds)]
    [costs], _ = relative([[*passes, *others]], _TURNS)
    own_pass = costs[len(WIDTHS)] / _OWN.draft_length if drafts else 1.0
    look = max(costs[-1] - costs[-2], 0) if rounds else _LOOK_ON_CPUS
    return _costs(costs[: len(WIDTHS)], own_pass, look)


def _host_decides() -> bool:
    """Whether conditions wait for the host, so that a look takes long enough to be timed."""
    return jax.default_backend() != "cpu"


def _costs(passes: list[float], draft: float, look: float) -> Costs:
    # A wider pass takes no less: where it seemed to, a neighbour slowed the narrow one.
    passes = np.maximum.accumulate(passes).tolist()
    cheap = [n for n, passed in zip(WIDTHS, passes, strict=True) if passed - 1 < _CHEAP * look]
    return Costs(
        np.array(passes, np.float32), np.float32(draft), np.float32(look),
        loops=look > _LONG_LOOK, least=max(cheap, default=0),
    )  # fmt: skip


@partial(jax.jit, donate_argnames="state")
@own_settings()
def _draft_repeatedly(params: Params, state: DecodeState, repeats: int) -> Timed:
    """Drafts with the model as `Auto` does, but never stops before the drafter's length."""
    level = _OWN.init(params, state, width=0)

    def one_draft(_: jax.Array, carry: Timed) -> Timed:
        state, total = carry
        drafted, cache = _OWN.draft(params, _OWN.enter(level, state), None, _NEVER, coupled=True)
        cache = _OWN.leave(level, state, cache, state.lengths)[1]
        return dataclasses.replace(state, cache=cache), total + jnp.sum(drafted.tokens)

    carry: Timed = lax.fori_loop(0, repeats, one_draft, (state, jnp.int32(0)))
    return carry


@partial(jax.jit, donate_argnames="state")
@own_settings()
def _decode_repeatedly(
    params: Params, state: DecodeState, repeats: int, *, drafter: Drafter
) -> Timed:
    """Runs rounds without the layers: drafters differ in what is beside them. The state returned
    is the one before."""
    draft = drafter.init(params, state, width=state.tokens.shape[1])

    def one_round(_: jax.Array, carry: Timed) -> Timed:
        after, verified = step(params, carry[0], drafter, layers=())
        return after, carry[1] + jnp.sum(verified.count)

    start = dataclasses.replace(state, draft=draft), jnp.int32(0)
    after, total = lax.fori_loop(0, repeats, one_round, start)
    cache = after.cache.with_lengths(state.cache.lengths)
    return dataclasses.replace(state, cache=cache, tokens=after.tokens), total


def _may_pay(costs: Costs) -> bool:
    """Whether drafts of the model itself gain anything where nearly all of them are kept."""
    passes, draft = costs.passes.tolist(), float(costs.draft)
    return any(
        sum(_LIKELY**n for n in range(width + 1)) > width * draft + passed
        for width, passed in zip(WIDTHS[1:], passes[1:], strict=True)
    )


def _state(params: Params, at: Point) -> DecodeState:
    """A state in the middle of decoding; what its tokens are does not matter to time."""
    rows, capacity = at.rows, at.slots
    cache = KVCache.create(params.config, rows, capacity, at.cache_bits, params.num_kv_heads)
    lengths = jnp.full(rows, at.context, jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        prompts=jnp.full_like(lengths, at.context),  # another buffer: the state is donated
        lengths=lengths,
        limits=lengths + WIDTHS[-1],
        finished=jnp.zeros(rows, bool),
        failed=jnp.zeros(rows, bool),
        cache=cache.with_lengths(lengths - 1),
        keys=None,
        draft=None,
        stats=Stats.zeros(rows),
        sampling=None,
        stop_tokens=(),
        vocab_size=params.config.vocab_size,
    )


def _description(params: Params, at: Point) -> str:
    """All that costs depend on, as text."""
    leaves, structure = jax.tree.flatten(params)
    shapes = " ".join(f"{leaf.dtype}{leaf.shape}" for leaf in leaves)
    return json.dumps({
        "version": __version__,
        "kernels": digest(),
        "machine": machine(),
        "model": hashlib.sha256(f"{structure} {shapes}".encode()).hexdigest(),
        **at._asdict(),
    })  # fmt: skip


def _read(file: Path, described: str) -> _Kept | None:
    """The costs in a file; None unless it holds some for this description."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        passes = [float(each) for each in found["passes"]]
        draft, look = float(found["draft"]), float(found["look"])
        fits = found["measured on"] == described and len(passes) == len(WIDTHS)
        until = file.stat().st_mtime + _BUSY_SECONDS if found["busy"] else math.inf
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not fits or not 0 <= look < math.inf:
        return None
    if not all(0 < each < math.inf for each in (*passes, draft)):
        return None
    kept = _Kept(_costs(passes, draft, look), until)
    return kept if kept.holds else None


def _write(file: Path, described: str, costs: Costs, busy: bool) -> None:
    """Keeps costs; nothing happens where the disk takes none."""
    measured = {"draft": float(costs.draft), "look": float(costs.look)}
    found = {"measured on": described, "passes": costs.passes.tolist(), **measured, "busy": busy}
    try:
        write_whole(file, json.dumps(found))
    except OSError:
        return
