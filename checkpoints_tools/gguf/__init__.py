"""Models in GGUF files, the format of llama.cpp."""

from checkpoints_tools.gguf.header import is_gguf
from checkpoints_tools.gguf.model import held_as, open_gguf
from checkpoints_tools.gguf.tokenizer import read_gguf_tokenizer

__all__ = ["held_as", "is_gguf", "open_gguf", "read_gguf_tokenizer"]
