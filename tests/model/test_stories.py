"""A real trained model: stories260K, against its author's reference text."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import specjax
from tests.support.covering import representatives

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    return data / "models" / "stories260K"


@pytest.fixture(scope="module")
def params(folder: Path) -> specjax.Params:
    return specjax.load(folder / "hf")


def _text(folder: Path, ids: list[int]) -> str:
    """Tokens to text by the vocabulary of llama2.c (score, length and bytes of each entry)."""
    raw, offset, pieces = (folder / "tok512.bin").read_bytes(), 4, []
    while offset < len(raw):
        (size,) = struct.unpack_from("<i", raw, offset + 4)
        pieces.append(raw[offset + 8 : offset + 8 + size].decode())
        offset += 8 + size
    text = "".join(pieces[i] for i in ids[1:])  # without the first token, which begins a text
    return re.sub(r"<0x(..)>", lambda byte: chr(int(byte[1], 16)), text).removeprefix(" ")


def test_reproduces_the_authors_text(folder: Path, params: specjax.Params) -> None:
    expected = json.loads((folder / "greedy_ids_numpy.json").read_text())
    result = specjax.decode(
        params, expected[:1], max_new_tokens=len(expected) - 1, stop_tokens=(),
        drafter=specjax.Autoregressive(),
    )  # fmt: skip
    ids = np.asarray(result.tokens[0]).tolist()
    assert ids == expected
    assert _text(folder, ids) + "\n" == (folder / "greedy_reference.txt").read_text()


@pytest.mark.parametrize("activation", representatives(["a8", "a4"], "a8"))
def test_qspec_writes_the_same_story(params: specjax.Params, activation: str) -> None:
    quantized = specjax.quantize(params)
    prompts = np.array([[1, 403, 407, 261], [1, 335, 429, 312], [1, 300, 310, 320]])
    plain = specjax.decode(quantized, prompts, drafter=specjax.Autoregressive())
    drafted = specjax.decode(quantized, prompts, drafter=specjax.QSpec(4, activation))
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert float(drafted.stats.acceptance_rate) > 0.3
