"""Compares the token ids of SmolLM2's GGUF file with those of llama.cpp, line by line.

The lines are those of `texts/*.txt`, of the prompts' files, and of some odd characters: several
scripts, emoji, control characters, runs of spaces, names of special tokens. Every line must also
decode to itself, byte for byte, without names of special tokens.

    python -m benchmarks.exactness.tokens --peer PYTHON --json OUT

`--peer` names the Python of an environment that `benchmarks/peers/install.sh` makes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import specjax
from benchmarks.support.common import parser, table, write
from benchmarks.support.instruct import MODEL
from benchmarks.support.peer_process import LlamaCpp

ODD = (
    " ", "  ", "\t", "\u00a0", "\u3000", "\x7f", "a", "Z", "'s", "'LL", "7", "12345", "½", "Ⅷ",
    "é", "e\u0301", "ß", "Ω", "я", "ش", "क्षि", "ก็", "漢字", "한글", "かな", "🙂",
    "\U0001f469\u200d\U0001f467", "\u200b", "\ufeff", "…", "—", "<|im_start|>", "<|im_end|>",
    "</s>", "def f(x):", "#include", "\\", "{}", "http://", "_", "__init__",
)  # fmt: skip


def main() -> int:
    options = _options()
    tokenizer, peer = specjax.load_tokenizer(MODEL), LlamaCpp(options.peer)
    rows = []
    for source, lines in _sources(options.data, options.lines).items():
        ours = [tokenizer.encode(line, special_tokens=False) for line in lines]
        theirs = peer.encoded(lines)
        expected = [_without(tokenizer.special_tokens(), line) for line in lines]
        back = map(tokenizer.decode, ours)
        rows.append({
            "source": source, "lines": len(lines), "tokens": sum(map(len, ours)),
            "differing_lines": sum(a != b for a, b in zip(ours, theirs["ids"], strict=True)),
            "decoded_to_others": sum(a != b for a, b in zip(back, expected, strict=True)),
            "peer": f"llama-cpp-python {theirs['version']}",
        })  # fmt: skip
    peer.close()
    print(table(rows, list(rows[0])))
    write(options.json, rows)
    return 1 if any(row["differing_lines"] or row["decoded_to_others"] for row in rows) else 0


def _options() -> Any:
    parse = parser(__doc__)
    parse.add_argument("--peer", required=True, help="the Python that has llama-cpp-python")
    parse.add_argument("--lines", type=int, default=4000, help="lines of each source, at most")
    return parse.parse_args()


def _without(names: Iterable[str], line: str) -> str:
    for name in names:
        line = line.replace(name, "")
    return line


def _sources(data: Path, most: int) -> dict[str, list[str]]:
    """Lines by the name of their source; the odd ones are joined by chance from a fixed seed."""
    chance = random.Random(0)
    files = sorted([*(data / "texts").glob("*.txt"), *(data / "prompts").glob("*.jsonl")])
    found = {"odd": ["".join(chance.choices(ODD, k=chance.randint(1, 12))) for _ in range(most)]}
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        found[file.stem] = chance.sample(lines, min(most, len(lines)))
    return found


if __name__ == "__main__":
    sys.exit(main())
