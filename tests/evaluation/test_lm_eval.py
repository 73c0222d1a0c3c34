"""lm-evaluation-harness itself, on tasks that are written here, against what specjax's own
functions give for the same texts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specjax
from specjax.cli import main
from specjax.commands.lm_eval import read_options
from specjax.evaluation.likelihood import log_likelihoods, rolling_log_likelihoods
from specjax.generation.batching import complete

os.environ["HF_HUB_OFFLINE"] = "1"  # the harness's libraries read it when they are imported

QUESTIONS = (
    {"text": "The king had three sons, and the", "right": " youngest was called", "wrong": " zinc"},
    {"text": "Once upon a time there was", "right": " a king", "wrong": " 17%"},
    {"text": "She opened the door and saw an old", "right": " woman", "wrong": " of the of"},
)
TINY = Path(specjax.__file__).parent / "models" / "tiny"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
STORY = "There was once a poor woman who lived in a village, and she had two sons. " * 30
MODEL_ARGS = {"pretrained": "tiny", "drafter": "qspec", "draft_length": 4}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
{rest}
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: 0
doc_to_choice: "{{[right, wrong]}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: [".", "king said"], max_gen_toks: 24}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "reading": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
""",
}


@pytest.fixture(scope="module")
def harness() -> Any:
    return pytest.importorskip("lm_eval", reason="needs pip install 'specjax[lm-eval]'")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    texts = [*QUESTIONS, {"text": STORY, "right": " They", "wrong": " They they"}]
    data.write_text("".join(json.dumps(each) + "\n" for each in texts))
    for name, rest in TASKS.items():
        text = TASK.format(name=name, data=data, cache=folder / "cache", rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


def _evaluate(harness: Any, tasks: Path, names: Sequence[str], **arguments: Any) -> dict[str, list]:
    """By task, the model's answers to every item."""
    from lm_eval.tasks import TaskManager

    from specjax.evaluation.lm_eval import SpecjaxLM

    results = harness.simple_evaluate(
        model=SpecjaxLM(**read_options(**{**MODEL_ARGS, "batch_size": 3, **arguments})),
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        name: [each["filtered_resps"] for each in results["samples"][name]] for name in names
    } | {"scores": results["results"]}


def _pairs(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens of each question's context and of each of its answers."""
    pairs = []
    for each in QUESTIONS:
        context = tokenizer.encode(each["text"])
        for answer in (each["right"], each["wrong"]):
            whole = tokenizer.encode(each["text"] + answer)
            assert whole[: len(context)] == context
            pairs.append((context, whole[len(context) :]))
    return pairs


# The numbers are those of specjax's own functions, to the last bit, and the drafter is in none.
def test_likelihoods(harness: Any, tasks: Path) -> None:
    params, tokenizer = specjax.load("tiny"), specjax.load_tokenizer("tiny")
    expected = log_likelihoods(params, _pairs(tokenizer))
    texts = [tokenizer.encode(each["text"]) for each in QUESTIONS] + [tokenizer.encode(STORY)]
    assert len(texts[-1]) > params.config.max_position_embeddings
    sums = rolling_log_likelihoods(params, texts, prefix=params.config.stop_tokens[0])
    for drafter in ("qspec", "prompt-lookup"):
        answers = _evaluate(harness, tasks, ("choice", "reading"), drafter=drafter)
        found = [tuple(answer) for item in answers["choice"] for answer in item]
        assert [(float(nats), str(likely) == "True") for nats, likely in found[:6]] == expected
        assert [float(item[0]) for item in answers["reading"]] == sums
        right = np.array([nats for nats, _ in expected]).reshape(-1, 2).argmax(1) == 0
        story = float(found[6][0]) > float(found[7][0])
        assert answers["scores"]["choice"]["acc,none"] == np.mean([*right, story])


# Continuations are `generate`'s up to the first of the strings, with any drafter and batch.
@pytest.mark.exhaustive
def test_continuations(harness: Any, tasks: Path) -> None:
    params, tokenizer = specjax.load("tiny"), specjax.load_tokenizer("tiny")
    expected = []
    for each in QUESTIONS:
        written = specjax.generate(params, tokenizer, each["text"], max_new_tokens=24)
        expected.append(written.text.split("king said")[0].split(".")[0])
    assert any(expected)
    for arguments in (
        {}, {"drafter": "autoregressive", "draft_length": None, "batch_size": 1}
    ):  # fmt: skip
        answers = _evaluate(harness, tasks, ("writing",), **arguments)["writing"]
        assert [text for (text,) in answers[:3]] == expected


@pytest.mark.exhaustive
def test_command(harness: Any, tasks: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["specjax"])
    arguments = [
        "lm-eval", "run", "--model", "specjax", "--tasks", "choice", "--include_path", str(tasks),
        "--model_args", "pretrained=tiny,drafter=layer-skip,layers=[0,1,2]", "--batch_size", "4",
        "--output_path", str(tmp_path), "--limit", "3",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert "|choice|" in capsys.readouterr().out
    (file,) = tmp_path.rglob("results_*.json")
    answers = _evaluate(harness, tasks, ("choice",))["choice"][:3]
    right = [float(first[0]) > float(second[0]) for first, second in answers]
    assert json.loads(file.read_text())["results"]["choice"]["acc,none"] == np.mean(right)


class _Model:
    """The harness's model and requests to it, without a task."""

    def __init__(self, **arguments: Any) -> None:
        from specjax.evaluation.lm_eval import SpecjaxLM

        self.model = SpecjaxLM(**read_options(**{**MODEL_ARGS, **arguments}))

    def generate(self, *contexts: str, **settings: Any) -> list[str]:
        from lm_eval.api.instance import Instance

        requests = [
            Instance("generate_until", {}, (context, dict(settings)), number)
            for number, context in enumerate(contexts)
        ]
        return self.model.generate_until(requests, disable_tqdm=True)


# A continuation ends at the first string that comes, whatever their order and their place in it.
@pytest.mark.exhaustive
@pytest.mark.parametrize("until", [["e"], ["zzz", "the", "e"], "e"])
def test_until(harness: Any, until: Any) -> None:
    model = _Model()
    (whole,) = model.generate("Once upon a time", max_gen_toks=20)
    assert "e" in whole and "zzz" not in whole
    (cut,) = model.generate("Once upon a time", until=until, max_gen_toks=20)
    ends = [until] if isinstance(until, str) else until
    assert cut == min((whole.split(end)[0] for end in ends), key=len)
    assert len(cut) < len(whole)


# Decoding ends with the string, of however many tokens; special tokens show in no text.
@pytest.mark.exhaustive
def test_strings_end_the_decoding(harness: Any, monkeypatch: Any) -> None:
    model = _Model()
    (whole,) = model.generate("Once upon a time", max_gen_toks=20)
    seen: list[Any] = []

    def decode(*arguments: Any, **options: Any) -> Any:
        for number, completion in complete(*arguments, **options):
            seen.append(completion)
            yield number, completion

    monkeypatch.setattr("specjax.evaluation.lm_eval.complete", decode)
    end = whole[4:12]
    assert len(specjax.load_tokenizer("tiny").encode(end)) > 1
    assert model.generate("Once upon a time", until=[end], max_gen_toks=20) == [whole[:4]]
    assert int(seen[0].stats.generated) < 10
    assert model.model._stop_tokens(["\n", "<|endoftext|>"]) == (0,)


# A context that is too long keeps its last tokens, and an empty one begins with the end of a text.
@pytest.mark.exhaustive
def test_contexts_of_any_length(harness: Any) -> None:
    model = _Model()
    params, tokenizer = specjax.load("tiny"), specjax.load_tokenizer("tiny")
    kept = tokenizer.encode(STORY)[-(512 - 8) :]
    prompts = [kept, [params.config.stop_tokens[0]]]
    expected = [
        tokenizer.decode(each.tokens[len(prompt) :])
        for prompt, each in zip(
            prompts, specjax.decode_many(params, prompts, max_new_tokens=8), strict=True
        )
    ]
    assert model.generate(STORY, "", max_gen_toks=8) == expected
    with pytest.raises(ValueError, match="max_gen_toks=512 leaves no room for a prompt"):
        model.generate("a", max_gen_toks=512)


@pytest.mark.exhaustive
def test_sampling_follows_the_seed(harness: Any) -> None:
    settings = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 0, "max_gen_toks": 16}
    prompts = ["Once upon a time"] * 2
    first, again, other = (_Model(seed=seed).generate(*prompts, **settings) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] != first[1]
    greedy = _Model().generate(*prompts, do_sample=True, temperature=0.0, max_gen_toks=16)
    assert greedy == _Model().generate(*prompts, max_gen_toks=16)


def test_unknown_generation_arguments(harness: Any) -> None:
    with pytest.raises(ValueError, match="got repetition_penalty"):
        _Model().generate("a", repetition_penalty=1.3)


# The context of a request is what the template makes of it; without one nothing is decoded.
@pytest.mark.exhaustive
def test_chat_templates(harness: Any, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        _conversations(harness, tasks, _Model().model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    model = _Model()
    model.model._tokenizer = specjax.load_tokenizer(tmp_path)
    samples = _conversations(harness, tasks, model.model)
    assert len(samples) == len(QUESTIONS) + 1
    contexts = [f"<user>{sample['doc']['text']}<answer>" for sample in samples]
    assert [sample["arguments"][0][0] for sample in samples] == contexts
    answers = model.generate(*contexts[:2], until=[".", "king said"], max_gen_toks=24)
    assert [sample["filtered_resps"] for sample in samples[:2]] == [[answer] for answer in answers]


def _conversations(harness: Any, tasks: Path, model: Any) -> list[dict[str, Any]]:
    from lm_eval.tasks import TaskManager

    return harness.simple_evaluate(
        model=model, tasks=["writing"], apply_chat_template=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["samples"]["writing"]  # fmt: skip


def test_options() -> None:
    made = read_options(
        "tiny-16bit", quantize="rtn", group_size=64, drafter="qspec", draft_length=[4, 2],
        draft=["tiny-draft"], activation="a4", cache_bits=8, batch_size="auto:4", seed=3,
    )  # fmt: skip
    assert isinstance(made["drafter"], specjax.MultiLevel)
    assert made["drafter"].outer == specjax.QSpec(4, "a4")
    assert (made["rows"], made["cache_bits"], made["seed"]) == (8, 8, 3)
    assert read_options(batch_size="2")["drafter"] == specjax.Auto()
    assert read_options(draft_length=2)["drafter"] == specjax.QSpec(2, "a8")
    assert read_options(batch_size="2")["rows"] == 2
    spectra = read_options(drafter="spectra", window=2, guesses=2, text="false")["drafter"]
    assert spectra == specjax.Spectra(window=2, guesses=2, text=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_lenght": 3}, "qspec takes draft_length, .*; got 'draft_lenght'"),
        ({"model": "tiny-16bit"}, "qspec takes draft_length, .*; got 'model'"),
        ({"drafter": "eagle"}, "drafter must be one of auto, .* got 'eagle'"),
        ({"group_size": 7}, "group_size must be 32, 64, 128 or none, got '7'"),
        ({"cache_bits": 5}, "cache_bits must be"),
        ({"drafter": "layer-skip"}, "needs --layers"),
        ({"layers": [0, 1]}, "qspec takes draft_length, .*; got 'layers'"),
        ({"pretrained": "tiny-16bit", "drafter": "qspec"}, "the qspec drafter needs 4-bit ones"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(**options)


# Without the harness one sentence says what to install.
def test_the_harness_is_missing(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["lm-eval", "--model", "specjax"]) == 1
    assert capsys.readouterr().err == (
        "specjax: lm-eval needs the harness: pip install 'specjax[lm-eval]'\n"
    )
