"""Convert a 16-bit model, quantize a draft for it, decode with both, and measure.

python examples/quantize_and_draft.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import specjax


def main(folder: Path) -> None:
    # Convert: any Hugging Face directory in place of "tiny-16bit".
    specjax.save(specjax.load("tiny-16bit"), folder / "target")
    target = specjax.load(folder / "target")
    tokenizer = specjax.load_tokenizer("tiny-16bit")

    # Quantize: the draft shares embeddings and norms with its target.
    cast = specjax.quantize(target, "mxfp4", lm_head=True)
    print(f"target {target.nbytes / 1e6:.1f} MB, cast {cast.nbytes / 1e6:.1f} MB")

    # Draft: the cast proposes from the target's own KV cache.
    drafter = specjax.DraftModel(cast, draft_length=4, share_cache=True)
    prompt = tokenizer.encode("def add(a, b):")

    # Measure: the second call is timed, since the first compiles.
    outputs = []
    for name, chosen in (("plain", specjax.Autoregressive()), ("drafted", drafter)):
        for _ in range(2):
            begin = time.perf_counter()
            result = specjax.decode(target, prompt, max_new_tokens=64, drafter=chosen)
            outputs.append(np.asarray(result.tokens))
            seconds = time.perf_counter() - begin
        rate = int(result.lengths[0]) / seconds
        per_round = float(result.stats.tokens_per_round)
        print(f"{name}: {rate:.0f} tokens per second, {per_round:.2f} per target pass")
    print("identical to plain decoding:", np.array_equal(outputs[0], outputs[-1]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
