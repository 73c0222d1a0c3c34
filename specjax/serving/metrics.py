"""The counts of a server, for Prometheus: the names are vLLM's, with specjax's prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counts of one server.

    The mean acceptance length is 1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._prompt = self._counter("prompt_tokens", "tokens of prompts")
        self._generation = self._counter("generation_tokens", "new tokens")
        self._drafts = self._counter("spec_decode_num_drafts", "drafts, one per row and round")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "tokens drafted")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "drafted tokens accepted")
        self._places = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "the same by place in the draft", "position"
        )
        self._success = self._counter("request_success", "finished outputs", "finished_reason")
        self._failures = self._counter("engine_failures", "exceptions that ended all outputs")
        self.first = self._histogram("time_to_first_token_seconds", "from request to first token")
        self.between = self._histogram(
            "inter_token_latency_seconds", "between tokens, an output's mean"
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "from request to last token")

    def watch(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """Adds a number that is asked for when somebody looks."""
        Gauge(f"specjax:{name}", help_, registry=self._registry).set_function(value)

    def verified(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Counts rounds: int32[R, rounds] each, of the rows that ran."""
        self._drafts.inc(int(np.count_nonzero(drafted)))
        self._drafted.inc(int(drafted.sum()))
        self._accepted.inc(int(accepted.sum()))
        for place in range(int(accepted.max(initial=0))):
            self._places.labels(str(place)).inc(int(np.count_nonzero(accepted > place)))

    def asked(self, tokens: int) -> None:
        """Counts a prompt."""
        self._prompt.inc(tokens)

    def generated(self, tokens: int) -> None:
        """Counts new tokens."""
        self._generation.inc(tokens)

    def finished(self, reason: str) -> None:
        """Counts a finished output."""
        self._success.labels(reason).inc()

    def failed(self) -> None:
        """Counts an exception in the engine."""
        self._failures.inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"specjax:{name}", help_, labels, registry=self._registry)

    def _histogram(self, name: str, help_: str) -> Histogram:
        return Histogram(f"specjax:{name}", help_, buckets=_SECONDS, registry=self._registry)
