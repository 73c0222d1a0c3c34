"""Other engines in processes of their own, which hold SmolLM2's GGUF file and answer requests."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.support.common import ROOT
from benchmarks.support.instruct import MODEL
from checkpoints_tools.sources import locate


class Peer:
    """A process of a module of `benchmarks/peers`, which describes requests and answers.

    python: the Python of an environment that has the engine.
    """

    module: str

    def __init__(self, python: str) -> None:
        command = [python, "-m", f"benchmarks.peers.{self.module}", str(locate(MODEL))]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class LlamaCpp(Peer):
    """llama.cpp, for an environment that has llama-cpp-python."""

    module = "llama_cpp_texts"

    def continued(
        self, asked: list[list[int]], new_tokens: int, stop: tuple[int, ...]
    ) -> dict[str, Any]:
        """Continues prompts greedily, up to a stop token or `new_tokens`."""
        return self._ask({"prompts": asked, "new_tokens": new_tokens, "stop": list(stop)})

    def encoded(self, texts: list[str]) -> dict[str, Any]:
        """Encodes texts; special tokens are read by their names."""
        return self._ask({"texts": texts})


class Transformers(Peer):
    """transformers on torch, in bfloat16."""

    module = "transformers_texts"

    def continued(
        self, prompt: list[int], new_tokens: int, stop: tuple[int, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Continues a prompt greedily, with the options of `generate`."""
        request = {"prompt": prompt, "new_tokens": new_tokens, "stop": list(stop)}
        return self._ask({**request, "options": options})
