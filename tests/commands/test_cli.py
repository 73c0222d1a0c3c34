"""The command line: what it prints, and one sentence with exit status 1 when it cannot."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import specjax
from checkpoints_tools.sources import SHIPPED_PATH
from specjax.cli import main
from specjax.commands.drafters import add_drafter, make_drafter, read_drafter
from specjax.commands.memory import keep, with_memory
from specjax.commands.options import load_target
from tests.support.random_models import random_model


def _generate(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "Once upon a time", "--max-new-tokens", "24", *options]) == 0
    return capsys.readouterr().out


def _kept(traced: str) -> str:
    """The text of a trace, without its marks and its rejected drafts."""
    kept = re.sub(r"\[-.*?-\]", "", traced.rsplit("\n\n", 1)[0], flags=re.DOTALL)
    return re.sub(r"\{\+(.*?)\+\}", r"\1", kept, flags=re.DOTALL)


def test_generate_prints_text_and_what_it_took(capsys) -> None:
    out = _generate(capsys)
    assert out.startswith("Once upon a time")
    assert re.search(r"\d+ tokens in \d+ rounds .*drafts accepted .*tokens/s", out)


def test_drafting_does_not_change_the_text(capsys) -> None:
    texts = [
        _generate(capsys, *options).rsplit("\n\n", 1)[0]
        for options in ([], ["--drafter", "autoregressive"], ["--draft-activation", "a4"])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_trace_marks_every_token(capsys) -> None:
    plain, traced = _generate(capsys), _generate(capsys, "--trace", "--draft-activation", "a4")
    assert _kept(traced) == plain.rsplit("\n\n", 1)[0]
    assert "{+" in traced.rsplit("\n\n", 1)[0]


@pytest.mark.parametrize("trace", [(), ("--trace",)])
def test_a_text_ends_before_a_stop(trace: tuple[str, ...], capsys) -> None:
    whole = _generate(capsys).rsplit("\n\n", 1)[0]
    stop = whole[40:45]
    shown = _kept(_generate(capsys, "--stop", "no such text", "--stop", stop, *trace))
    assert shown == whole[: whole.index(stop)]


def test_an_empty_stop_is_refused(capsys) -> None:
    assert main(["generate", "Once upon a time", "--stop", ""]) == 1
    assert "--stop must name a text, got an empty one" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_sampling_follows_the_seed(capsys) -> None:
    runs = [_generate(capsys, "--temperature", "1", "--seed", seed) for seed in ("1", "1", "2")]
    texts = [run.rsplit("\n\n", 1)[0] for run in runs]
    assert texts[0] == texts[1] != texts[2]


def test_a_temperature_of_0_is_greedy(capsys) -> None:
    text, cold = _generate(capsys), _generate(capsys, "--temperature", "0", "--top-p", "0.9")
    assert cold.rsplit("\n\n", 1)[0] == text.rsplit("\n\n", 1)[0]


@pytest.mark.exhaustive
def test_samples_are_those_of_generate(capsys) -> None:
    out = _generate(capsys, "--temperature", "1", "--samples", "3", "--seed", "5", "--stop", "zz")
    expected = specjax.generate(
        specjax.load("tiny"), specjax.load_tokenizer("tiny"), "Once upon a time", samples=3,
        max_new_tokens=24, sampling=specjax.Sampling(temperature=1), key=jax.random.key(5),
    )  # fmt: skip
    for number, each in enumerate(expected, 1):
        assert f"[{number}] Once upon a time{each.text}\n" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--samples", "2"), "--samples needs an option of sampling"),
        (("--samples", "0", "--top-k", "3"), "--samples must be at least 1, got 0"),
        (("--samples", "2", "--top-k", "3", "--trace"), "--trace shows one output"),
        (("--logprobs", "-1"), "logprobs must be in 0 …"),
    ],
)
def test_samples_and_log_probabilities_that_cannot_be_shown(options, sentence, capsys) -> None:
    assert main(["generate", "Once upon a time", *options]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.exhaustive
def test_log_probabilities_of_every_token(capsys) -> None:
    """Greedy: the token itself is the most probable one."""
    _, _, table = _generate(capsys, "--logprobs", "2").rpartition("most probable\n")
    lines = table.splitlines()
    assert len(lines) == 24
    for line in lines:
        token, own, top = re.fullmatch(r" *\d+  (['\"].*['\"]) +(-?[\d.]+)  (.*)", line).groups()
        assert top.startswith(f"{token.rstrip()} {own}, ")


def test_commands_at_once_add_to_one_memory(tmp_path) -> None:
    params, place = random_model(), tmp_path / "new" / "memory"
    texts = [list(range(first, first + 8)) for first in range(0, 32, 8)]

    def command(text: list[int]) -> None:
        with_memory(specjax.Auto(), params, place)
        together.wait(timeout=60)
        keep(params, [text], place)

    together = threading.Barrier(len(texts))
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(command, texts))
    every = specjax.SuffixMemory.create(params.config.vocab_size).add(texts)
    kept = specjax.SuffixMemory.load(place)
    assert np.count_nonzero(kept.entries) == np.count_nonzero(every.entries)


def test_a_16_bit_model_is_quantized_on_request(capsys) -> None:
    out = _generate(capsys, "--model", "tiny-16bit", "--quantize", "rtn")
    assert out.rsplit("\n\n", 1)[0] == _generate(capsys).rsplit("\n\n", 1)[0]


# Every kind of drafter, alone and on top of another: the text is plain decoding's.
@pytest.mark.parametrize(
    "options",
    [
        "--draft mxfp4 --share-cache --draft-length 4",
        "--draft mxfp4 --draft-lm-head --draft tiny-16bit --draft-length 4,2 --confidence 0.3",
        "--draft mxfp4 --draft ngram --draft-length 6",
    ],
)
@pytest.mark.exhaustive
def test_draft_models_do_not_change_the_text(options, capsys) -> None:
    command = ["--model", "tiny-16bit", "--drafter"]
    drafted = _generate(capsys, *command, "draft-model", *options.split())
    plain = _generate(capsys, *command, "autoregressive")
    assert drafted.rsplit("\n\n", 1)[0] == plain.rsplit("\n\n", 1)[0]
    assert "drafts accepted" in drafted


@pytest.mark.exhaustive
def test_drafters_without_a_model_do_not_change_the_text(llama, capsys, tmp_path) -> None:
    """Nor does layer skip, alone and with another drafter below."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w72 w33 w44 w5\nw1 w2 w3 w4\n")
    store = str(tmp_path / "store")
    assert main(["datastore", "build", str(corpus), store, "--keep", "2"]) == 0
    capsys.readouterr()
    command = ["generate", "w72 w33 w44", "--max-new-tokens", "20", "--drafter"]
    texts = []
    for options in (
        "autoregressive",
        "layer-skip --layers 0 --draft-activation a8",
        "layer-skip --layers 0 --draft retrieval --draft-length 4 --datastore " + store,
        "spectra --datastore " + store,
    ):
        assert main([*command, *options.split()]) == 0
        texts.append(capsys.readouterr().out.rsplit("\n\n", 1)[0])
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ("--drafter autoregressive", specjax.Autoregressive()),
        ("--draft-length 2 --draft-activation a4", specjax.QSpec(2, "a4")),
        ("--drafter qspec:schedule=heuristic", specjax.QSpec(schedule=specjax.Heuristic())),
        (
            "--drafter qspec:schedule=(adaptive:draft_cost=0.2,memory=32)",
            specjax.QSpec(schedule=specjax.Adaptive(draft_cost=0.2, memory=32.0)),
        ),
        ("--drafter prompt-lookup --draft-length 3", specjax.PromptLookup(3)),
        ("--drafter ngram:ngram=4", specjax.NGram(ngram=4)),
        ("--drafter lookahead:text=false", specjax.Lookahead(text=False)),
        ("--drafter spectra:window=2,guesses=2", specjax.Spectra(window=2, guesses=2)),
        (
            "--drafter layer-skip --layers 0,2 --draft ngram:ngram=2 --draft-length 4",
            specjax.MultiLevel(specjax.LayerSkip((0, 2), 4), specjax.NGram(ngram=2)),
        ),
        (
            "--drafter combined:first=spectra:window=2,second=ngram",
            specjax.Combined(specjax.Spectra(window=2), specjax.NGram()),
        ),
    ],
)
def test_every_field_of_a_drafter_can_be_set(options, drafter) -> None:
    parser = argparse.ArgumentParser()
    add_drafter(parser)
    chosen = read_drafter(parser.parse_args(options.split()))
    assert make_drafter(chosen, load_target("tiny", None, 128)) == drafter


def test_every_field_of_a_second_model_can_be_set() -> None:
    parser = argparse.ArgumentParser()
    add_drafter(parser)
    options = (
        "--drafter layer-skip:layers=0,2 --draft-length 6 --confidence 0.3 "
        "--draft mxfp4:draft_length=2,activation=a8,share_cache=true"
    )
    made = make_drafter(
        read_drafter(parser.parse_args(options.split())), load_target("tiny", None, 128)
    )
    assert isinstance(made, specjax.MultiLevel)
    inner = made.inner
    assert isinstance(inner, specjax.DraftModel)
    assert (inner.draft_length, inner.activation, inner.share_cache) == (2, "a8", True)
    assert inner.confidence == 0.3  # what is given for all of them
    assert made.outer == specjax.LayerSkip((0, 2), 6, confidence=0.3)


def test_one_line_per_command(capsys) -> None:
    for command in ([], ["evaluate"], ["plan"], ["datastore"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        _, _, listed = capsys.readouterr().out.partition("\n\n")[2].rpartition(":\n")
        lines = listed.split("\n\n")[0].splitlines()
        assert lines and all(re.match(r"  [\w-]+ +\S", line) for line in lines if line)


@pytest.mark.exhaustive
def test_a_draft_with_another_tokenizer_is_translated(capsys, tmp_path) -> None:
    """Draft models of another vocabulary need no option of their own."""
    draft = tmp_path / "draft"
    shutil.copytree(SHIPPED_PATH / "tiny-draft", draft)
    written = json.loads((draft / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    first, second = vocab["Ġthe"], vocab["Ġa"]
    written["model"]["vocab"] = vocab | {"Ġthe": second, "Ġa": first}
    (draft / "tokenizer.json").write_text(json.dumps(written))
    command = ["--model", "tiny-16bit", "--max-new-tokens", "16", "--drafter"]
    plain = _generate(capsys, *command, "autoregressive")
    drafted = _generate(capsys, *command, "draft-model", "--draft", str(draft))
    assert drafted.rsplit("\n\n", 1)[0] == plain.rsplit("\n\n", 1)[0]
    assert "drafts accepted" in drafted


def test_sampling_options_reach_the_sampler(llama, capsys) -> None:
    """min-p of 1 leaves the most probable token alone: greedy decoding, by way of sampling."""
    command = ["generate", "w72 w33 w44", "--max-new-tokens", "20", "--drafter", "autoregressive"]
    texts = []
    for options in ([], ["--min-p", "1"], ["--top-k", "1", "--repetition-penalty", "1000000"]):
        assert main([*command, *options]) == 0
        texts.append(capsys.readouterr().out.rsplit("\n\n", 1)[0].split())
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[2])) == len(texts[2]) > len(set(texts[0]))  # nothing comes twice
    assert (
        main([*command, "--top-k", "1", "--logit-bias", "5=100", "--frequency-penalty", "2"]) == 0
    )
    assert capsys.readouterr().out.count("w5 ") > 15


@pytest.mark.exhaustive
def test_output_keeps_to_a_grammar(capsys, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "green"]}')
    texts = [
        _generate(capsys, *options, "--drafter", "autoregressive").rsplit("\n\n", 1)[0]
        for options in (["--json-schema", str(schema)], ["--regex", " (was|were) [a-f]{2}"])
    ]
    assert re.fullmatch('Once upon a time"(red|green)"', texts[0])
    assert re.fullmatch("Once upon a time (was|were) [a-f]{2}", texts[1])


# A model that ships, quantized with the text of a file, can be decoded.
@pytest.mark.exhaustive
def test_quantize_with_calibration_text(capsys, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who lived near the woods. " * 4)
    out = tmp_path / "quantized"
    command = ["convert", "tiny-16bit", str(out), "--quantize", "gptq", "--sequences", "2"]
    assert main([*command, "--length", "16", "--calibration", str(text)]) == 0
    assert re.search(r"100% .* gone, .* left, peak \d+\.\d\d GB", capsys.readouterr().err)
    assert _generate(capsys, "--model", str(out)).startswith("Once upon a time")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quantized", "text.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "no/such/place"], "no/such/place"),
        (["generate", "", "--model", "tiny"], "prompt is empty"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["generate", "x", "--draft-length", "0"], "draft_length must be at least 1, got 0"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "x", "--model", "tiny-16bit", "--drafter", "qspec"], "--quantize rtn"),
        (
            ["generate", "x", "--drafter", "ngram", "--draft", "mxfp4"],
            "--draft goes with --drafter qspec, draft-model, layer-skip, got ngram",
        ),
        (["generate", "x", "--drafter", "draft-model"], "needs --draft"),
        (["generate", "x", "--drafter", "draft-model", "--draft", "spectra"], "needs --draft"),
        (["generate", "x", "--drafter", "retrieval"], "retrieval needs --datastore"),
        (
            ["generate", "x", "--drafter", "ngram", "--datastore", "d"],
            "ngram takes draft_length, ngram; got 'datastore'",
        ),
        (
            ["generate", "x", "--drafter", "eagle"],
            "drafter must be one of auto, autoregressive, qspec",
        ),
        (
            ["generate", "x", "--drafter", "ngram:window=2"],
            "ngram takes draft_length, ngram; got 'window'",
        ),
        (
            ["generate", "x", "--drafter", "spectra:window=two"],
            "window of spectra must be an integer, got 'two'",
        ),
        (
            ["generate", "x", "--drafter", "qspec:draft-length=3", "--draft-length", "2"],
            "--drafter qspec:draft-length=3 and --draft-length both give draft_length",
        ),
        (["generate", "x", "--draft-lm-head"], "--draft-lm-head goes with --draft"),
        (
            ["generate", "x", "--drafter", "ngram", "--confidence", "0.5"],
            "ngram takes draft_length, ngram; got 'confidence'",
        ),
        (["generate", "x", "--drafter", "layer-skip"], "needs --layers"),
        (["generate", "x", "--drafter", "layer-skip", "--layers", "0,99"], "layers must be in 0 …"),
        (
            ["generate", "x", "--drafter", "draft-model", "--draft", "mxfp4:layers=2"],
            "--draft mxfp4:layers=2: a model takes draft_length, activation, share_cache, "
            "confidence, schedule, window; got 'layers'",
        ),
        (["generate", "x", "--draft-length", "3,2"], "--draft-length must be one number or one"),
        (
            ["generate", "x", "--drafter", "draft-model", "--draft", "gguf"],
            "--draft names no model, and no method",
        ),
        (["generate", "x", "--min-p", "nan"], "min_p must be in [0, 1]"),
        (["generate", "x", "--repetition-penalty", "0"], "repetition_penalty must be in"),
        (["generate", "x", "--regex", "(a"], "the regular expression is refused: "),
        (["generate", "x", "--json-schema", "/nowhere.json"], "has no nowhere.json"),
        (["generate", "x", "--logit-bias", "3=101"], "a bias of logit_bias must be in [-100, 100]"),
        (["generate", "x", "--logit-bias", "99999=1"], "logit_bias holds token 99999, outside"),
        (["plan", "speed"], "plan speed needs --acceptance and --draft-cost"),
        (["plan", "speed", "--acceptance", "0.8", "--draft-cost", "0.2,0.1"], "a number each per"),
        (["plan", "speed", "--acceptance", "1.1", "--draft-cost", "0.2"], "in 0 … 1, got 1.1"),
        (["plan", "speed", "--acceptance", "nan", "--draft-cost", "0.2"], "in 0 … 1, got nan"),
        (["plan", "speed", "--acceptance", "0.8", "--draft-cost", "-1"], "must be 0 or more"),
        (["plan", "speed", "--acceptance", "0.8", "--draft-cost", "nan"], "must be 0 or more"),
        (["plan", "speed", "--measure"], "--measure needs --prompts"),
        (
            ["plan", "speed", "--acceptance", "0.8", "--draft-cost", "0.2", "--longest", "99999"],
            "longest must be at most 256, got 99999",
        ),
        (["plan", "memory", "--device", "1MB"], "at least the weights, 4.54 MB"),
        (["plan", "memory", "--rows", "0"], "rows must be at least 1, got 0"),
        (["plan", "memory", "--context", "0"], "context must be at least 1, got 0"),
        (["plan", "memory", "--model", "no/such/place"], "no/such/place"),
        (["plan", "memory", "--share-cache"], "draft must name the draft's format"),
        (["plan", "layers", "no-such-file"], "no-such-file"),
        (["convert", "no/such/place", "out"], "no/such/place"),
        (["quantize", "no/such/place", "out"], "no/such/place"),
        (["convert", "tiny-16bit", "out", "--quantize", "gguf"], "method must be one of rtn"),
        (["convert", "tiny-16bit", "out", "--quantize", "gptq"], "'gptq' needs calibration"),
        (
            ["convert", "tiny-16bit", "out", "--quantize", "gptq", "--calibration", "no-such-file"],
            "no-such-file",
        ),
    ],
)
def test_one_sentence_and_exit_status_1(arguments, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    printed = capsys.readouterr()
    error = printed.err
    assert message in error and error.startswith("specjax: ") and error.count("\n") == 1
    assert printed.out == ""
    assert not list(tmp_path.iterdir()), "something was left behind"


@pytest.mark.parametrize("size", ["7", "abc", ""])
@pytest.mark.parametrize(
    "command", [["generate", "x"], ["convert", "from", "to"], ["quantize", "from", "to"]]
)
def test_a_bad_group_size_says_which_are_accepted(command, size, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--group-size", size])
    assert stop.value.code == 2
    assert f"must be 32, 64, 128 or none, got {size!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--layers", "0,b"], "must be integers with commas"),
        (["plan", "memory", "--device", "80 apples"], "must be bytes or a number with"),
        (["plan", "speed", "--acceptance", "high"], "must be numbers with commas"),
    ],
)
def test_a_bad_number_says_what_is_accepted(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_trace_keeps_the_spaces_of_sentencepiece(llama, capsys) -> None:
    command = ["generate", "w72 w33 w44", "--max-new-tokens", "40", "--draft-activation", "a4"]
    assert main(command) == 0
    plain = capsys.readouterr().out.rsplit("\n\n", 1)[0]
    assert re.fullmatch(r"w72 w33 w44( w\d+){40}", plain)
    assert main([*command, "--trace"]) == 0
    traced = capsys.readouterr().out
    assert _kept(traced) == plain
    assert "{+ w" in traced and "[- w" in traced


@pytest.mark.exhaustive
def test_trace_leaves_stop_tokens_out(llama, capsys, monkeypatch) -> None:
    command = ["generate", "w72 w33 w44", "--max-new-tokens", "40", "--trace"]
    assert main(command) == 0
    words = _kept(capsys.readouterr().out).split()
    stop = int(words[9][1:])
    config = dataclasses.replace(llama.config, stop_tokens=(stop,))
    stopping = dataclasses.replace(llama, config=config)
    monkeypatch.setattr("specjax.load", lambda source, **_: stopping)
    assert main(command) == 0
    traced = capsys.readouterr().out.rsplit("\n\n", 1)[0]
    assert _kept(traced).split() == words[: words.index(f"w{stop}")]
    assert not re.search(rf"\bw{stop}\b", traced)


def test_evaluate_perplexity(tmp_path, capsys) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "numbers.json"
    text.write_text("Once upon a time there was a king who had three daughters. " * 6)
    options = ["--window", "64", "--rows", "2", "--json", str(target)]
    assert main(["evaluate", "perplexity", str(text), *options]) == 0
    numbers = json.loads(target.read_text())
    assert f"perplexity: {numbers['perplexity']:.4f}" in capsys.readouterr().out
    assert 1 < numbers["perplexity"] < 4096
    tokens = specjax.load_tokenizer("tiny").encode(text.read_text())
    nats = math.log(numbers["perplexity"]) * (len(tokens) - 1)
    assert numbers["bits per byte"] == pytest.approx(nats / math.log(2) / len(text.read_bytes()))


@pytest.mark.exhaustive
def test_evaluate_fidelity(tmp_path, capsys) -> None:
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "numbers.json"
    prompts.write_text('{"question": "How many apples?"}\n{"prompt": "Once upon a time"}\n')
    options = ["--compared", "a8", "--max-new-tokens", "12", "--json", str(target)]
    picture = tmp_path / "scatter.png"
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--picture", str(picture)]
    assert main(["evaluate", "fidelity", str(prompts), *options]) == 0
    numbers = json.loads(target.read_text())
    assert numbers["tokens"] == 24 and 0 < numbers["accepted"] <= 1
    assert f"accepted: {numbers['accepted']:.4f}" in capsys.readouterr().out
    assert picture.exists() == ("--picture" in options)


def test_evaluate_says_what_is_wrong(tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"answer": "four"}\n')
    assert main(["evaluate", "fidelity", str(prompts)]) == 1
    assert "line 1" in capsys.readouterr().err
    assert main(["evaluate", "perplexity", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err
