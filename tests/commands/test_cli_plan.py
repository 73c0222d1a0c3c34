"""`specjax plan`: its numbers are the library's."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

import specjax
from specjax.cli import main
from specjax.drafting import calibration
from tests.support.gguf_files import CONFIG, fields, random_tensors, write_gguf
from tests.support.word_tokenizer import WordTokenizer


def _picture(tmp_path, name: str) -> list[str]:
    """The option to draw, where there is something to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    return ["--picture", str(tmp_path / f"{name}.png")]


def test_plan_memory(tmp_path, capsys) -> None:
    target = tmp_path / "numbers.json"
    options = ["--weights", "int4", "--draft-weights", "mxfp4", "--share-cache", "--json"]
    picture = _picture(tmp_path, "memory")
    assert main(["plan", "memory", *options, str(target), "--device", "20MB", *picture]) == 0
    numbers = json.loads(target.read_text())
    params = specjax.load("tiny")
    assert numbers["target"] == params.nbytes and numbers["draft_cache"] == 0
    parts = ("target", "draft", "target_cache", "draft_cache", "activations")
    assert numbers["total"] == sum(numbers[part] for part in parts) < 20e6
    assert numbers["longest context"] == params.config.max_position_embeddings
    assert re.search(rf"most rows +{numbers['most rows']}\n", capsys.readouterr().out)
    assert len(list(tmp_path.glob("*.png"))) == bool(picture)


def test_plan_memory_of_a_gguf_file(tmp_path) -> None:
    file = write_gguf(tmp_path / "small.gguf", fields(), random_tensors())  # in Q4_1
    target = tmp_path / "numbers.json"
    assert main(["plan", "memory", "--model", str(file), "--json", str(target)]) == 0
    expected = specjax.planning.weight_bytes(CONFIG, "int4")
    assert json.loads(target.read_text())["target"] == expected


def test_plan_speed(tmp_path, capsys) -> None:
    target = tmp_path / "numbers.json"
    options = ["--acceptance", "0.9,0.6", "--draft-cost", "0.25,0.02", "--longest", "6"]
    picture = _picture(tmp_path, "speed")
    assert main(["plan", "speed", *options, "--json", str(target), *picture]) == 0
    lengths = json.loads(target.read_text())["lengths"]
    best = max(lengths, key=lambda row: row["speed-up"])
    levels = [specjax.planning.Level(0.9), specjax.planning.Level(0.6, pass_cost=0.25)]
    expected = specjax.planning.best_draft_lengths(levels, 0.02, 6)
    assert best["draft length"] == expected[0].draft_length
    assert best["speed-up"] == specjax.planning.speedup(expected, 0.02)
    assert f"best: {best['draft length']} drafts" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == bool(picture)
    assert main(["plan", "speed", "--acceptance", "0.1", "--draft-cost", "0.9"]) == 0
    assert "does not pay" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_plan_speed_measures(llama, tmp_path, capsys) -> None:
    prompts, target = tmp_path / "prompts.txt", tmp_path / "numbers.json"
    prompts.write_text("w72 w33 w44\nw1 w2\n")
    command = ["plan", "speed", "--measure", "--drafter", "layer-skip", "--layers", "0,1"]
    options = ["--prompts", str(prompts), "--rows", "2", "--max-new-tokens", "8", "--json"]
    assert main([*command, "--draft-length", "1", *options, str(target)]) == 0
    numbers = json.loads(target.read_text())
    assert [level["acceptance"] for level in numbers["levels"]] == [1]  # all layers: the target
    assert len(numbers["levels"][0]["measured"]) == 2
    assert re.search(r"Adaptive\(draft_cost=\d.*row_cost=\d", capsys.readouterr().out)
    assert main([*command, *options[:4], "--limit", "1"]) == 1
    assert "rows must be in 1 … 1, the number of prompts, got 2" in capsys.readouterr().err


def test_plan_layers(llama, tmp_path, capsys) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "numbers.json"
    text.write_text(" ".join(f"w{2 + i * 7 % 90}" for i in range(40)))
    picture = _picture(tmp_path, "layers")
    options = ["--sequences", "2", "--length", "16", "--json", str(target), *picture]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WordTokenizer, "encode", lambda _, text: [int(w[1:]) for w in text.split()])
        assert main(["plan", "layers", str(text), *options]) == 0
    (found,) = json.loads(target.read_text())["sets"]
    assert found["layers"] in ([0], [1]) and 0 <= found["acceptance"] <= 1
    out = capsys.readouterr().out
    assert ("--drafter layer-skip --layers" in out) == (found["speedup"] >= 1)
    assert len(list(tmp_path.glob("*.png"))) == bool(picture)


def test_plan_calibrate(tmp_path, monkeypatch, capsys) -> None:
    """The default drafter weighs drafts by the costs that were measured."""
    target = tmp_path / "costs.json"
    command = ["plan", "calibrate", "--rows", "2", "--json", str(target)]
    assert main(command) == 1
    assert "costs of a smaller model are estimated" in capsys.readouterr().err
    assert main(["plan", "calibrate", "--rows", "0"]) == 1
    assert "--rows must be at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setattr(calibration, "_LEAST_BYTES", 0)
    params = specjax.load("tiny")
    monkeypatch.setattr(specjax, "load", lambda source, **_: params)
    assert main(command) == 0
    (costs,) = json.loads(target.read_text())["costs"]
    kept = calibration.costs_of(params, 2)
    assert costs["rows"] == 2 and costs["passes"] == kept.passes.tolist()
    assert costs["look"] == float(kept.look)
    assert costs["passes"][0] == 1 and costs["draft"] == float(kept.draft) != 1
    assert re.search(
        r"^rows +0 drafts +1 drafts .*draft pass +look for drafts$", capsys.readouterr().out, re.M
    )
