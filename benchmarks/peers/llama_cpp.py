"""Measures llama.cpp through its C interface, on GGUF files of random weights in Q4_0 and Q8_0.

It quantizes activations to 8 bits for products with either format. `install.sh` beside this file
installs it.

    python -m benchmarks.peers.llama_cpp [--batch 1 8] [--context 128 2048]
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from functools import partial
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np

from benchmarks import peers

FORMATS = ("Q4_0", "Q8_0")
ERROR = 4  # GGML_LOG_LEVEL_ERROR


def write_model(path: Path, *, weight_format: str, layers: int) -> None:
    """Writes a GGUF file of the shape: all matrices in one format, and tokens without names."""
    shape = peers.SHAPE
    kind = gguf.GGMLQuantizationType[weight_format]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_heads"])
    writer.add_head_count_kv(shape["num_kv_heads"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)

    def matrix(name: str, rows: int, columns: int) -> None:
        # A few random rows repeat, because the time does not depend on the values.
        few = gguf.quantize(rng.normal(0, 0.02, (64, columns)).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", np.tile(few, (rows // 64, 1)), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape["hidden_size"], np.float32))

    hidden, feed_forward = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_heads"] * shape["head_dim"]
    keys = shape["num_kv_heads"] * shape["head_dim"]
    for i in range(layers):
        norm(f"blk.{i}.attn_norm")
        matrix(f"blk.{i}.attn_q", queries, hidden)
        matrix(f"blk.{i}.attn_k", keys, hidden)
        matrix(f"blk.{i}.attn_v", keys, hidden)
        matrix(f"blk.{i}.attn_output", hidden, queries)
        norm(f"blk.{i}.ffn_norm")
        matrix(f"blk.{i}.ffn_gate", feed_forward, hidden)
        matrix(f"blk.{i}.ffn_up", feed_forward, hidden)
        matrix(f"blk.{i}.ffn_down", hidden, feed_forward)
    matrix("token_embd", shape["vocab_size"], hidden)
    norm("output_norm")
    matrix("output", shape["vocab_size"], hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Decoder:
    """A context of `batch` sequences, each with `length` tokens of prompt in its own cache."""

    def __init__(self, model: llama.llama_model_p, batch: int, length: int) -> None:
        options = llama.llama_context_default_params()
        room = length + peers.STEPS * (peers.ROUNDS + 1)
        options.n_ctx = batch * (-(-room // 256) * 256)  # divided evenly; in blocks of 256
        options.n_batch = max(batch, length, 512)
        options.n_seq_max = batch
        options.n_threads = options.n_threads_batch = peers.CORES
        options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama.llama_init_from_model(model, options)
        if self.context is None:
            raise RuntimeError(f"llama.cpp could not make a context of {options.n_ctx} tokens")
        self.tokens = llama.llama_batch_init(options.n_batch, 0, 1)
        self.batch = batch
        self.position = 0
        for start in range(0, length, options.n_batch):
            stop = min(start + options.n_batch, length)
            self._decode([(0, position) for position in range(start, stop)])
        for row in range(1, batch):
            llama.llama_memory_seq_cp(llama.llama_get_memory(self.context), 0, row, -1, -1)
        self.position = length

    def step(self) -> None:
        """Decodes one new token for each sequence."""
        self._decode([(row, self.position) for row in range(self.batch)])
        self.position += 1

    def read(self, length: int) -> None:
        """Reads a prompt into the emptied cache, with the logits of every token."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        self._decode([(0, position) for position in range(length)], every=True)

    def close(self) -> None:
        llama.llama_batch_free(self.tokens)
        llama.llama_free(self.context)

    def _decode(self, places: list[tuple[int, int]], every: bool = False) -> None:
        """Decodes token 1 at each (sequence, position), with logits for the last of a sequence, or
        for every token."""
        last = dict(places)
        self.tokens.n_tokens = len(places)
        for i, (row, position) in enumerate(places):
            self.tokens.token[i] = 1
            self.tokens.pos[i] = position
            self.tokens.n_seq_id[i] = 1
            self.tokens.seq_id[i][0] = row
            self.tokens.logits[i] = every or position == last[row]
        if status := llama.llama_decode(self.context, self.tokens):
            raise RuntimeError(f"llama_decode returned {status}")
        llama.llama_synchronize(self.context)


@llama.llama_log_callback
def errors_only(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Lets llama.cpp print errors only."""
    if level == ERROR:
        sys.stderr.write(text.decode())


def _version() -> str:
    """llama.cpp's version, and whether it was compiled for the tile products of the processor."""
    tiles = b"AMX_INT8 = 1" in llama.llama_print_system_info()
    return str(llama.__version__) + (", with AMX" if tiles else "")


def main() -> None:
    options = peers.parser(__doc__).parse_args()
    llama.llama_log_set(errors_only, None)
    llama.llama_backend_init()
    for weight_format in FORMATS:
        path = peers.made(
            options.models / f"llama-{options.layers}-{weight_format}.gguf",
            partial(write_model, weight_format=weight_format, layers=options.layers),
        )
        model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        if model is None:
            raise RuntimeError(f"llama.cpp could not load {path}")
        engine = f"llama.cpp {weight_format}", _version(), weight_format, "a8"
        for batch, context in itertools.product(options.batch, options.context):
            decoder = Decoder(model, batch, peers.prompt_length(context))
            peers.measure(*engine, batch, context, decoder.step)
            decoder.close()
        for length in options.read:
            decoder = Decoder(model, 1, length)
            peers.measure(*engine, 1, 0, partial(decoder.read, length), length)
            decoder.close()
        llama.llama_model_free(model)


if __name__ == "__main__":
    main()
