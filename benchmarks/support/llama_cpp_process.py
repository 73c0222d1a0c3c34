"""llama.cpp in a process of its own, which holds SmolLM2's GGUF file and answers requests."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.support.common import ROOT
from benchmarks.support.instruct import MODEL
from checkpoints_tools.sources import locate


class LlamaCpp:
    """A process of `benchmarks/peers/llama_cpp_texts.py`, which describes requests and answers.

    python: the Python of an environment that has llama-cpp-python.
    """

    def __init__(self, python: str) -> None:
        command = [python, "-m", "benchmarks.peers.llama_cpp_texts", str(locate(MODEL))]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def continued(
        self, asked: list[list[int]], new_tokens: int, stop: tuple[int, ...]
    ) -> dict[str, Any]:
        """Continues prompts greedily, up to a stop token or `new_tokens`."""
        return self._ask({"prompts": asked, "new_tokens": new_tokens, "stop": list(stop)})

    def encoded(self, texts: list[str]) -> dict[str, Any]:
        """Encodes texts; special tokens are read by their names."""
        return self._ask({"texts": texts})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer
