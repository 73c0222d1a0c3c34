"""Continues texts greedily by transformers on torch, for benchmarks/speed/beside_speculation.py.

The script loads a GGUF file, whose weights transformers writes out in bfloat16, then reads requests
from standard input, a line of JSON each, and answers each with a line:

    {"prompt": [1, 2], "new_tokens": 64, "stop": [2], "options": {"prompt_lookup_num_tokens": 10}}
    {"tokens": [5, 6, 2], "version": "transformers 5.24.0, torch 2.13.0"}

`options` are those of `generate` that choose how tokens are drafted; without them, none are.

    python -m benchmarks.peers.transformers_texts MODEL.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import peers


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Continues the prompt of a request."""
    prompt = torch.tensor([request["prompt"]])
    with torch.inference_mode():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=request["new_tokens"], eos_token_id=request["stop"],
            pad_token_id=request["stop"][0], **request["options"],
        )  # fmt: skip
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return {"tokens": tokens[0, prompt.shape[1] :].tolist(), "version": version}


def main() -> None:
    path = Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(peers.CORES)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    ).eval()
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
