"""Computes the logits of a GGUF model by transformers on torch, which dequantizes the file itself.

Reads token ids, int[B, T], from a .npy file, and writes float32[B, T, V] to another.

    python -m benchmarks.peers.transformers_logits MODEL.gguf TOKENS.npy LOGITS.npy
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    model_file, tokens_file, logits_file = map(Path, sys.argv[1:])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    tokens = torch.from_numpy(np.load(tokens_file).astype(np.int64))
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits for row in tokens])
    np.save(logits_file, logits.numpy())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
