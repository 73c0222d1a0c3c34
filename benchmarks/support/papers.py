"""The papers' tables of speed and acceptance that SmolLM2 can stand for, with their numbers.

A table says what is decoded and which numbers of the paper stand beside ours. docs/papers.md
says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import specjax
from benchmarks.support.instruct import target
from pallas_kernels.activations import Activation
from specjax import Drafter, DraftModel, Lookahead, MultiLevel, NGram, QSpec, Spectra

Drafters = dict[str, Callable[[], Drafter]]


class Table(NamedTuple):
    """A table or figure of a paper.

    target: the model, by its name in `instruct.target`.
    drafters: by name; plain decoding is always measured.
    kinds: the prompts, as in `instruct.prompts`.
    rows: batch sizes.
    column: the number of ours that the paper's stand beside: "speedup", "kept" (accepted over
        drafted), "accepted" (over those that were decided on) or "tokens_per_round".
    printed: the paper's numbers, by drafter and kind, for every batch size or for one.
    """

    target: str
    drafters: Drafters
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    column: str
    printed: Mapping[tuple[str, str], float | Mapping[int, float]]

    def number(self, drafter: str, kind: str, rows: int) -> float | None:
        """The paper's number for a cell, or None."""
        found = self.printed.get((drafter, kind))
        return found if found is None or isinstance(found, float) else found.get(rows)


def _draft(
    method: str,
    length: int,
    activation: Activation = "a16",
    confidence: float | None = None,
    **options: int,
) -> DraftModel:
    """A cast of the target that drafts in the target's cache."""
    cast = specjax.quantize(target("bfloat16"), method, lm_head=True, **options)
    return DraftModel(cast, length, activation, confidence=confidence, share_cache=True)


def _mxfp4(activation: Activation) -> Drafters:
    """ML-SpecQD's cast, with the paper's length and confidence, and n-grams below it."""
    return {
        f"MXFP4 cast, {activation}": lambda: _draft("mxfp4", 8, activation, 0.4),
        f"two levels, {activation}": lambda: MultiLevel(
            _draft("mxfp4", 8, activation, 0.4), NGram(2)
        ),
    }


def _int(bits: int, group_size: int) -> Callable[[], Drafter]:
    return lambda: _draft("rtn", 5, bits=bits, group_size=group_size)


_QSPEC: Drafters = {"QSpec": lambda: QSpec(3, "a8")}
_BY_METHOD: Drafters = {"QSpec a4": lambda: QSpec(3, "a4"), "QSpec a8": lambda: QSpec(3, "a8")}

TABLES = {
    # Llama-3.2-3B; the averages over the batch sizes.
    "qspec_4": Table("gguf", _QSPEC, ("arithmetic", "python", "chat"), (8, 16, 32), "speedup", {
        ("QSpec", "arithmetic"): 1.41, ("QSpec", "python"): 1.32, ("QSpec", "chat"): 1.25,
    }),
    "qspec_8": Table("gguf", _QSPEC, ("chat",), (1, 2, 4, 8, 16, 32), "speedup", {
        ("QSpec", "chat"): {1: 1.33, 2: 1.24, 4: 1.28, 8: 1.30, 16: 1.16, 32: 1.15},
    }),
    "qspec_9_atom": Table("atom", _BY_METHOD, ("chat", "math", "programs"), (8,), "kept", {
        ("QSpec a4", "chat"): 0.838, ("QSpec a4", "math"): 0.894, ("QSpec a4", "programs"): 0.886,
    }),
    "qspec_9_quarot": Table("quarot", _BY_METHOD, ("chat", "math", "programs"), (8,), "kept", {
        ("QSpec a4", "chat"): 0.816, ("QSpec a4", "math"): 0.889, ("QSpec a4", "programs"): 0.854,
    }),
    "qspec_figure_5": Table("gguf", {
        f"QSpec, {length} drafts": lambda length=length: QSpec(length, "a8")
        for length in (2, 3, 4, 5, 6)
    }, ("arithmetic", "chat"), (8,), "kept", {("QSpec, 6 drafts", "arithmetic"): 0.74}),
    # Llama-2-7B-chat, greedy.
    "spectra_1": Table("gguf", {
        "ANPD": lambda: NGram(5),
        "Lookahead": lambda: Lookahead(window=5, guesses=5),
        "SPECTRA, the paper's": Spectra.paper,
        "SPECTRA, W = G = 2": lambda: Spectra(window=2, guesses=2),
    }, ("arithmetic", "python", "programs", "chat"), (1,), "tokens_per_round", {
        ("ANPD", "arithmetic"): 1.69, ("ANPD", "python"): 1.82, ("ANPD", "programs"): 1.82,
        ("ANPD", "chat"): 1.46,
        ("Lookahead", "arithmetic"): 2.67, ("Lookahead", "python"): 2.77,
        ("Lookahead", "programs"): 2.16, ("Lookahead", "chat"): 2.02,
        ("SPECTRA, the paper's", "arithmetic"): 4.57, ("SPECTRA, the paper's", "python"): 4.65,
        ("SPECTRA, the paper's", "programs"): 3.36, ("SPECTRA, the paper's", "chat"): 3.58,
    }),
    # Questions to Llama-2-7B, MBPP to Qwen2.5-Coder-7B.
    "ml_specqd": Table("bfloat16", {
        **_mxfp4("a16"), **_mxfp4("a8"),
    }, ("chat", "programs"), (1,), "speedup", {
        ("MXFP4 cast, a8", "chat"): 1.86, ("two levels, a8", "chat"): 2.22,
        ("MXFP4 cast, a8", "programs"): 2.03, ("two levels, a8", "programs"): 2.72,
        ("MXFP4 cast, a16", "programs"): 1.90, ("two levels, a16", "programs"): 2.16,
    }),
    # Llama-2-7B in these formats drafts for Llama-2-70B there.
    "article": Table("bfloat16", {
        "INT8": lambda: _draft("int8", 5), "INT4, g128": _int(4, 128), "INT4, g32": _int(4, 32),
        "INT3, g128": _int(3, 128), "INT2, g128": _int(2, 128),
    }, ("chat",), (1,), "accepted", {
        ("INT8", "chat"): 0.771, ("INT4, g128", "chat"): 0.724, ("INT4, g32", "chat"): 0.738,
        ("INT3, g128", "chat"): 0.651, ("INT2, g128", "chat"): 0.542,
    }),
}  # fmt: skip
