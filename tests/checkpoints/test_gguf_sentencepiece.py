"""A GGUF file's SentencePiece tokenizer gives the ids of the sentencepiece package."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import sentencepiece

import specjax
from tests.support.gguf_files import fields, random_tensors, write_gguf

ODD = " ", "  ", "\t", "7", "12", "é", "ß", "я", "漢字", "🙂", "\u200b", "def f(x):", "__init__"


def tokenizer_fields(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """A model's pieces as a file's metadata."""

    def kind(i: int) -> int:
        named = ((2, model.is_unknown), (3, model.is_control), (6, model.is_byte))
        return next((number for number, holds in named if holds(i)), 1)

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": list(map(kind, ids)),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def lines(data: Path) -> list[str]:
    chance = random.Random(0)
    text = (data / "texts" / "GrimmsFairyTales.txt").read_text(encoding="utf-8").split("\n")
    real = chance.sample(list(filter(None, text)), 400)
    return real + ["".join(chance.choices(ODD, k=chance.randint(1, 12))) for _ in range(400)]


# sentencepiece drops spaces that this model finds too many; GGUF's tokenizers keep every space.
def test_ids_and_texts_are_those_of_sentencepiece(data: Path, tmp_path: Path) -> None:
    file = data / "tokenizers" / "storyllamas4096" / "tokenizer_4096.model"
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    others = {name: value for name, value in fields().items() if "tokenizer" not in name}
    written = write_gguf(tmp_path / "m.gguf", others | tokenizer_fields(model), random_tensors())
    tokenizer = specjax.load_tokenizer(written)
    compared = [line for line in lines(data) if model.normalize(line)[1:].replace("▁", " ") == line]
    assert len(compared) > 400
    for line in compared:
        ids = model.encode(line, add_bos=True)
        assert tokenizer.encode(line) == ids
        assert tokenizer.decode(ids) == model.decode(ids)
