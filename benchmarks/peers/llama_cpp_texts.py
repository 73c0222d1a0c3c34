"""Continues texts greedily by llama.cpp, for comparison in benchmarks/speed/beside_llama_cpp.py.

The script loads a GGUF file, then reads requests from standard input, a line of JSON each, and
answers each with a line:

    {"prompts": [[1, 2], [3]], "new_tokens": 64, "stop": [2]}
    {"tokens": [[…], […]], "read_seconds": 0.1, "step_seconds": 0.5, "steps": 63}
    {"texts": ["Once upon a time"]}
    {"ids": [[6403, 3814, 253, 655]], "version": "0.3.36"}

`read_seconds` end with the first new token of every prompt, `step_seconds` hold all others. `ids`
are the token ids of texts.
Every call runs all cores. With `--once`, it prints the first token that follows a text, and ends.

    python -m benchmarks.peers.llama_cpp_texts MODEL.gguf [--once TEXT]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks import peers
from benchmarks.peers.llama_cpp import errors_only

AT_ONCE = 2048  # tokens of prompts in one call
Place = tuple[int, int, int]  # a row, a position, and the token there


class Texts:
    """A context that holds some texts."""

    def __init__(self, model: llama.llama_model_p, prompts: Sequence[list[int]], new: int) -> None:
        options = llama.llama_context_default_params()
        room = -(-(max(map(len, prompts)) + new) // 256) * 256
        options.n_ctx = len(prompts) * room  # divided evenly
        options.n_batch = AT_ONCE
        options.n_seq_max = len(prompts)
        options.n_threads = options.n_threads_batch = peers.CORES
        options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama.llama_init_from_model(model, options)
        if self.context is None:
            raise RuntimeError(f"llama.cpp could not make a context of {options.n_ctx} tokens")
        self.batch = llama.llama_batch_init(AT_ONCE, 0, 1)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)

    def choose(self, places: Sequence[Place], ends: dict[int, int]) -> dict[int, int]:
        """Reads tokens, row by row, and returns the next tokens of some rows.

        ends: the last position of every row that wants its next token.
        """
        chosen: dict[int, int] = {}
        for begin in range(0, len(places), AT_ONCE):
            part = places[begin : begin + AT_ONCE]
            self.batch.n_tokens = len(part)
            for i, (row, position, token) in enumerate(part):
                self.batch.token[i] = token
                self.batch.pos[i] = position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = row
                self.batch.logits[i] = position == ends.get(row)
            if status := llama.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i, (row, position, _) in enumerate(part):
                if position == ends.get(row):
                    chosen[row] = self._largest(i)
        return chosen

    def _largest(self, i: int) -> int:
        logits = llama.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def answer(model: llama.llama_model_p, request: dict[str, Any]) -> dict[str, Any]:
    """Encodes the texts of a request, or continues its prompts until each ends or has enough."""
    if "texts" in request:
        ids = [encode(model, text) for text in request["texts"]]
        return {"ids": ids, "version": llama.__version__}
    prompts, new, stop = request["prompts"], request["new_tokens"], set(request["stop"])
    texts = Texts(model, prompts, new)
    places = [(row, i, token) for row, ids in enumerate(prompts) for i, token in enumerate(ids)]
    begin = time.perf_counter()
    chosen = texts.choose(places, {row: len(ids) - 1 for row, ids in enumerate(prompts)})
    read_seconds = time.perf_counter() - begin
    tokens = [[chosen[row]] for row in range(len(prompts))]
    begin, steps = time.perf_counter(), 0
    while active := {
        row: len(prompts[row]) + len(own) - 1
        for row, own in enumerate(tokens)
        if len(own) < new and own[-1] not in stop
    }:
        steps += 1
        places = [(row, position, tokens[row][-1]) for row, position in active.items()]
        for row, token in texts.choose(places, active).items():
            tokens[row].append(token)
    step_seconds = time.perf_counter() - begin
    texts.close()
    return {
        "tokens": tokens, "read_seconds": read_seconds, "step_seconds": step_seconds,
        "steps": steps, "version": llama.__version__,
    }  # fmt: skip


def encode(model: llama.llama_model_p, text: str) -> list[int]:
    """The ids of a text, special tokens read by their names."""
    data, room = text.encode(), 4 * len(text) + 8
    ids = (ctypes.c_int32 * room)()
    vocab = llama.llama_model_get_vocab(model)
    count = llama.llama_tokenize(vocab, data, len(data), ids, room, False, True)
    return list(ids[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--once", metavar="TEXT", help="print the first new token of this text")
    options = parser.parse_args()
    llama.llama_log_set(errors_only, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(
        str(options.model).encode(), llama.llama_model_default_params()
    )
    if model is None:
        raise RuntimeError(f"llama.cpp could not load {options.model}")
    if options.once is not None:
        request = {"prompts": [encode(model, options.once)], "new_tokens": 1, "stop": []}
        print(answer(model, request)["tokens"][0][0])
        return
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
