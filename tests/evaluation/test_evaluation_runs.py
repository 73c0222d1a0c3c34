"""Task sets through a model: what is recorded, that a killed run loses nothing, and the table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.cli import main
from specjax.evaluation import evaluate, perplexity
from specjax.evaluation.runs import Results
from specjax.evaluation.samples import sample
from specjax.evaluation.scoring import score_tokens
from specjax.evaluation.table import fidelity_rows, format_table
from specjax.evaluation.tasks import TASKS as TASKS_BY_NAME
from tests.support.random_models import CONFIG, quantized_model, random_model
from tests.support.task_files import write_tasks

PARAMS = quantized_model(group_size=32)
TASKS = ["gsm8k", "piqa", "wikitext2"]
OPTIONS = {"shots": 1, "max_new_tokens": 12, "rows": 2}


class Characters:
    """A tokenizer of the printable characters of ASCII, and the end of a line."""

    def encode(self, text: str) -> list[int]:
        return [95 if character == "\n" else ord(character) - 32 for character in text]

    def decode(self, ids) -> str:
        return "".join("\n" if token == 95 else chr(token + 32) for token in ids)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_tasks(tmp_path)
    return tmp_path


def _evaluate(folder: Path, tasks=TASKS, **options):
    return evaluate(PARAMS, Characters(), tasks, folder, **{**OPTIONS, **options})


def test_records_are_what_the_model_says(folder) -> None:
    written, chosen, text = _evaluate(folder, shots={"gsm8k": 1})
    prompts = [record["id"] for record in written.records]
    assert prompts == ["1", "2"]

    shown, question = ((folder / "prompts" / f"gsm8k_{part}.jsonl").read_text().splitlines()[0]
                       for part in ("train", "test"))  # fmt: skip
    prompt = (
        f"Question: {json.loads(shown)['question']}\nAnswer: 1 + 8 = 9\n#### 9\n\n"
        f"Question: {json.loads(question)['question']}\nAnswer:"
    )
    tokens = Characters().encode(prompt)
    result = specjax.decode(PARAMS, tokens, max_new_tokens=12)
    assert written.records[0]["tokens"] == np.asarray(result.tokens)[0, len(tokens) :].tolist()
    assert written.records[0]["generated"] == 12
    assert written.records[0]["rounds"] == int(result.stats.rounds[0])

    option = Characters().encode("Question: count apples\nAnswer: one by one")
    log_probs = np.asarray(score_tokens(PARAMS, jnp.array([option]))[0], np.float64)[0, -11:]
    np.testing.assert_allclose(chosen.records[0]["log_likelihoods"][0], log_probs.sum(), rtol=1e-5)
    right = sum(
        (record["log_likelihoods"][0] < record["log_likelihoods"][1]) == index % 2
        for index, record in enumerate(chosen.records)
    )
    assert chosen.metrics["accuracy"] == right / 5

    ids = Characters().encode((folder / "texts" / "wikitext2_valid.txt").read_text())
    expected = perplexity(PARAMS, ids, window=CONFIG.max_position_embeddings)
    np.testing.assert_allclose(text.metrics["perplexity"], expected.perplexity, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_later_turn_is_asked_after_the_answer_before_it(folder) -> None:
    (result,) = _evaluate(folder, ["mt_bench"])
    first, second = result.records
    assert (first["id"], second["id"]) == ("7", "7/2")
    prompt = f"Question: Tell a tale.\nAnswer:{first['text']}\n\nQuestion: Tell it again.\nAnswer:"
    decoded = specjax.decode(
        PARAMS, Characters().encode(prompt), max_new_tokens=12, drafter=specjax.Autoregressive()
    )
    assert second["tokens"] == decoded.tokens[0, len(prompt) : decoded.lengths[0]].tolist()
    assert result.progress.done == result.progress.total == 2


class Chat(Characters):
    """With a chat template."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        assert not special_tokens or "<" not in text, "the template holds the special tokens"
        return super().encode(text)

    def chat(self, messages) -> str:
        turns = (f"<{message['role']}>{message['content']}" for message in messages)
        return "".join(turns) + "<assistant>"


@pytest.mark.exhaustive
def test_questions_are_put_into_the_chat_template(folder) -> None:
    conversation, sums = evaluate(
        PARAMS, Chat(), ["mt_bench", "gsm8k"], folder, chat=True, **OPTIONS
    )
    first, second = conversation.records
    prompts = [
        "<user>Tell a tale.<assistant>",
        f"<user>Tell a tale.<assistant>{first['text']}<user>Tell it again.<assistant>",
    ]
    for record, prompt in zip((first, second), prompts, strict=True):
        decoded = specjax.decode(PARAMS, Chat().encode(prompt, False), max_new_tokens=12)
        assert record["tokens"] == decoded.tokens[0, len(prompt) : decoded.lengths[0]].tolist()
    assert len(sums.records) == 2 and sums.refused == 0
    with pytest.raises(ValueError, match="chat needs a tokenizer of specjax"):
        evaluate(PARAMS, Characters(), ["mt_bench"], folder, chat=True)


def test_decoding_ends_with_the_text_that_begins_another_question(folder, monkeypatch) -> None:
    """Here "a stop" is whatever the model writes as its fourth character."""
    (whole,) = _evaluate(folder, ["gsm8k"])
    stops = tuple({record["text"][3] for record in whole.records})
    task = dataclasses.replace(TASKS_BY_NAME["gsm8k"], stops=stops)
    monkeypatch.setitem(TASKS_BY_NAME, "gsm8k", task)
    (cut,) = _evaluate(folder, ["gsm8k"])
    for short, long in zip(cut.records, whole.records, strict=True):
        end = min(long["text"].index(stop) for stop in stops if stop in long["text"])
        assert short["text"] == long["text"][:end]
        assert short["tokens"] == long["tokens"][: end + 1] and short["generated"] == end + 1


def test_any_drafter_writes_the_same(folder) -> None:
    drafters = (specjax.Autoregressive(), specjax.QSpec(activation="a4"))
    plain, drafted = (
        _evaluate(folder, ["humaneval"], drafter=each, unsafe=True)[0] for each in drafters
    )
    assert [r["tokens"] for r in plain.records] == [r["tokens"] for r in drafted.records]
    assert plain.summary()["tokens"] == 12 and "acceptance" in drafted.summary()
    assert plain.metrics == {"pass@1": 0.0} and plain.records[0]["note"]


# One item does not fit: it says so, and the others are as they were.
def test_an_item_that_is_too_long(folder) -> None:
    whole = _evaluate(folder, ["gsm8k", "piqa"])
    for name, item in (
        ("gsm8k_test", {"question": "long " * 100, "answer": "#### 1"}),
        ("piqa", {"goal": "long", "sol1": "long " * 120, "sol2": "short", "label": 0}),
    ):
        path = folder / "prompts" / f"{name}.jsonl"
        path.write_text(json.dumps(item) + "\n" + path.read_text())
    written, chosen = _evaluate(folder, ["gsm8k", "piqa"])
    assert written.refused == chosen.refused == 1
    assert "the model has 512 positions" in written.records[0]["error"]
    assert "the model has 512 positions" in chosen.records[0]["error"]
    assert [r["tokens"] for r in written.records[1:]] == [r["tokens"] for r in whole[0].records]
    assert len(chosen.records) == 6 and "correct" in chosen.records[1]


class _KilledError(Exception):
    pass


# Whatever the item after which a run ends, the next one finishes the same file, byte for byte.
# The counts of Auto depend on the other rows, which are others after an end.
def test_an_ended_run_is_taken_up(folder) -> None:
    qspec = {"drafter": specjax.QSpec()}
    whole = _evaluate(folder, **qspec, out=folder / "whole.jsonl")
    expected = (folder / "whole.jsonl").read_bytes()
    for last in (1, 4, 7):
        out = folder / f"{last}.jsonl"
        seen = []

        def end(progress, last=last, seen=seen) -> None:
            seen.append(progress)
            if len(seen) == last:
                raise _KilledError

        with pytest.raises(_KilledError):
            _evaluate(folder, **qspec, out=out, progress=end)
        assert len(out.read_bytes().splitlines()) == 1 + last
        seen.clear()
        results = _evaluate(
            folder, **qspec, out=out, rows=3, progress=lambda state, seen=seen: seen.append(state)
        )
        assert len(seen) == 2 + 5 + 1 - last  # none is done again
        assert out.read_bytes() == expected
        assert [each.metrics for each in results] == [each.metrics for each in whole]


# One row at a time, the counts of Auto are an item's own: no item drafts from another's text.
def test_counts_do_not_depend_on_the_items_before(folder) -> None:
    options = {"tasks": ["gsm8k"], "rows": 1, "max_new_tokens": 24}
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    _evaluate(folder, **options, out=whole)
    head, _, second = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(head + second)  # the first is done again, after the second
    _evaluate(folder, **options, out=out)
    assert out.read_bytes() == whole.read_bytes()
    records = [json.loads(line) for line in whole.read_bytes().splitlines()[1:]]
    assert any(record["drafted"] for record in records), "a case that tests nothing"


# The whole lines of a torn file are kept, and nothing else.
def test_a_torn_file(tmp_path) -> None:
    settings = {"model": "m"}
    records = [{"task": "t", "id": str(i), "text": "é\n" * i} for i in range(3)]
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    keys = [("t", str(i)) for i in range(3)]
    with Results(whole, settings) as results:
        for record in reversed(records):
            results.add(record)
        results.finish(keys)
    data = whole.read_bytes()
    assert len(data.splitlines()) == 4
    for end in range(len(data)):
        torn.write_bytes(data[:end])
        with Results(torn, settings) as results:
            assert len(results.records) == max(data[:end].count(b"\n") - 1, 0)
            for record in records:
                if ("t", record["id"]) not in results.records:
                    results.add(record)
            results.finish(keys)
        assert torn.read_bytes() == data


def test_a_seed_decides_the_items(folder) -> None:
    (every,), (chosen,) = (_evaluate(folder, ["piqa"], limit=limit, sample_seed=42)
                           for limit in (None, 2))  # fmt: skip
    expected = sample([record["id"] for record in every.records], 2, 42)
    assert [record["id"] for record in chosen.records] == expected != ["1", "2"]
    out = folder / "sampled.jsonl"
    _evaluate(folder, ["piqa"], limit=2, sample_seed=42, out=out)
    with pytest.raises(ValueError, match="with sample_seed 42; this one has 7"):
        _evaluate(folder, ["piqa"], limit=2, sample_seed=7, out=out)


def test_a_sample_of_all_kinds_alike(folder, capsys) -> None:
    lines = [
        {
            "problem": f"What is ${n}$?",
            "answer": str(n),
            "subject": "algebra" if n < 5 else "counts",
        }
        for n in range(7)
    ]
    (folder / "prompts" / "math500.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (found,) = _evaluate(folder, ["math"], limit=4, shots=0, balanced=True)
    assert [record["id"] for record in found.records] == ["1", "2", "6", "7"]
    out, command = folder / "results.jsonl", ["evaluate", "math", "piqa", "--data", str(folder)]
    assert main([*command, "--limit", "2", "--balanced", "--shots", "math=0,piqa=2",
                 "--max-new-tokens", "2", "--out", str(out)]) == 0  # fmt: skip
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["shots"] == {"math": 0, "piqa": 2}
    assert [line["id"] for line in lines[1:]] == ["1", "6", "1", "2"]
    with pytest.raises(SystemExit):
        main([*command, "--shots", "piqa=1,piqa=2"])
    assert "must name each task once" in capsys.readouterr().err
    out.unlink()
    _evaluate(folder, ["math"], limit=4, shots=0, balanced=True, out=out)
    with pytest.raises(ValueError, match="holds results of another run, with data"):
        _evaluate(folder, ["math"], limit=4, shots=0, out=out)
    with pytest.raises(ValueError, match=r"balanced needs .* such as math, got gsm8k"):
        _evaluate(folder, ["gsm8k"], limit=1, balanced=True)


def test_summaries_have_the_means_of_their_scores(folder) -> None:
    scores = {"rouge1": 0.5, "rouge2": 0.25, "rougeL": 0.5}
    lines = [{"task": "xsum", "id": str(n), "correct": None, "note": "", "text": "", "tokens": [],
              **{name: score * n for name, score in scores.items()}} for n in (1, 2)]  # fmt: skip
    assert TASKS_BY_NAME["xsum"].metrics(lines) == {n: 1.5 * s for n, s in scores.items()}
    out = folder / "results.jsonl"
    (found,) = _evaluate(folder, ["xsum"], out=out)
    assert found.records[0]["correct"] is None and set(found.metrics) == set(scores)
    out.write_text(re.sub('"rouge2": [^,]+', '"rouge2": "much"', out.read_text()))
    with pytest.raises(ValueError, match="rouge2 in line 2 of"):
        _evaluate(folder, ["xsum"], out=out)


def test_files_that_are_refused(folder) -> None:
    out = folder / "out.jsonl"
    _evaluate(folder, ["piqa"], out=out)
    before = out.read_bytes()
    for change, message in (
        ({"tasks": ["winogrande"]}, r'with tasks \["piqa"\]; this one has \["winogrande"\]'),
        ({"limit": 3}, "with limit null; this one has 3"),
        ({"drafter": specjax.QSpec(draft_length=2)}, "with drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            _evaluate(folder, **{"tasks": ["piqa"], "out": out, **change})
    with pytest.raises(ValueError, match="with model"):
        evaluate(quantized_model(seed=1), Characters(), ["piqa"], folder, out=out, **OPTIONS)
    for old, new, message in (
        (b'"correct": ', b'"other": ', "has no correct in the result of 1: give another file"),
        (b'"correct": ', b'"correct": 1, "a": ', "correct in line 2 of .* must be true or false"),
        (b'"id": "1"', b'"id": ["1"]', r"id in line 2 of .* must be a text, got \['1'\]"),
        (b'"log_likelihoods": [', b'"log_likelihoods": ["",', "must be an integer from"),
    ):
        out.write_bytes(before.replace(old, new))
        with pytest.raises(ValueError, match=message):
            _evaluate(folder, ["piqa"], out=out)
    out.write_bytes(before)
    path = folder / "prompts" / "piqa.jsonl"
    path.write_text(path.read_text().replace("spoon", "ladle"))
    with pytest.raises(ValueError, match="with data"):
        _evaluate(folder, ["piqa"], out=out)
    assert out.read_bytes() == before
    for text in ("a letter", "a letter\n", '{"task": "piqa", "id": "1"}\n', "[]\n"):
        out.write_text(text)
        with pytest.raises(ValueError, match="result"):
            _evaluate(folder, ["piqa"], out=out)
        assert out.read_text() == text
    with Results(folder / "held.jsonl", {}), pytest.raises(ValueError, match="another process"):
        _evaluate(folder, ["piqa"], out=folder / "held.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shots": {"gsm8k": 1, "mbpp": 0}}, "shots names 'mbpp'; the tasks are gsm8k, piqa"),
        (
            {"shots": {"wikitext2": 1}},
            "shots must be 0 for wikitext2, which has no worked examples",
        ),
        ({"balanced": True}, "balanced goes with limit"),
        ({"shots": {"piqa": -1}}, "shots must be at least 0, got -1"),
        ({"sample_seed": -1}, "sample_seed must be an integer from 0 to 4294967295, got -1"),
        ({"tasks": ["gsm9k"]}, "unknown task 'gsm9k'; the tasks are gsm8k, math"),
        ({"tasks": ["piqa", "piqa"]}, "'piqa' twice"),
        ({"tasks": []}, "tasks must be a list of names"),
        ({"tasks": "piqa"}, "tasks must be a list of names"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"activation": "a2"}, "activation must be one of"),
        ({"activation": "a4", "drafter": specjax.QSpec()}, 'drafter goes with activation "a16"'),
    ],
)
def test_arguments_that_are_refused(change, message, folder) -> None:
    with pytest.raises(ValueError, match=message):
        _evaluate(folder, **change)


@pytest.mark.exhaustive
def test_the_table(folder) -> None:
    seen = set()
    tasks = ["gsm8k", "winogrande"]
    rows = [
        row
        for name, params in (("16-bit", random_model()), ("RTN", PARAMS))
        for row in fidelity_rows(
            name, params, Characters(), tasks, folder, out=folder / "out", **OPTIONS,
            progress=lambda method, state: seen.add((method, state.task)),
        )
    ]  # fmt: skip
    assert [row.method for row in rows] == ["W16A16", "W4A16", "QSpec", "W4A8", "W4A4"]
    drafted, lowest = rows[2], rows[4]
    assert drafted.compared == [True, True] and lowest.compared.count(False) > 0
    assert drafted.results[0].progress.drafted > 0 and rows[1].results[0].progress.drafted == 0
    assert drafted.results[1] is rows[1].results[1]
    assert ("QSpec", "gsm8k") in seen and ("QSpec", "winogrande") not in seen
    lines = format_table(rows).splitlines()
    assert lines[0] == "| model | method | gsm8k | winogrande | answers that differ |"
    assert lines[4].startswith("| RTN | QSpec | 0.0% |") and lines[4].endswith("| 0 of 2 |")
    assert len(list((folder / "out").iterdir())) == 5


@pytest.mark.exhaustive
def test_the_command_prints_and_writes_numbers(folder, capsys) -> None:
    target = folder / "numbers.json"
    command = ["evaluate", "gsm8k", "piqa", "--model", "tiny", "--data", str(folder), "--rows", "2"]
    options = ["--drafter", "qspec", "--shots", "1", "--max-new-tokens", "8"]
    assert main([*command, *options, "--json", str(target)]) == 0
    numbers = json.loads(target.read_text())
    assert numbers["gsm8k"]["items"] == 2 and numbers["piqa"]["items"] == 5
    assert "gsm8k: items 2, refused 0, exact match 0" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(folder, capsys) -> None:
    assert main(["evaluate", "piqa", "gsm9k", "--data", str(folder)]) == 1
    assert "unknown task 'gsm9k'" in capsys.readouterr().err
    assert main(["evaluate", "piqa", "--data", str(folder / "none")]) == 1
    assert "piqa.jsonl" in capsys.readouterr().err
    models = ["--models", "A=tiny", "A=tiny"]
    assert main(["evaluate", "table", "piqa", "--data", str(folder), *models]) == 1
    assert "different names, got A, A" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", "gsm9k", "--data", str(folder)])
    assert "gsm8k" in capsys.readouterr().err


# A task that runs programs ends before its first answer if nothing holds them.
def test_programs_run_behind_walls_or_when_told_to(folder, monkeypatch, capsys) -> None:
    def report(program, seconds, megabytes, unsafe) -> bytes:
        return b"none\n+" if unsafe else b"refused\nnamespaces and Landlock"

    monkeypatch.setattr("specjax.evaluation.sandbox._report", report)
    (result,) = _evaluate(folder, ["humaneval"], unsafe=True)
    assert result.metrics == {"pass@1": 1.0}
    monkeypatch.setattr("specjax.evaluation.tasks.written.complete", None)
    refusal = "does not allow namespaces and Landlock: use another system, or insist with"
    with pytest.raises(ValueError, match=refusal):
        _evaluate(folder, ["humaneval"])
    command = ["evaluate", "humaneval", "--model", "tiny", "--data", str(folder)]
    assert main(command) == 1 and refusal in capsys.readouterr().err
    with pytest.raises(TypeError, match="NoneType"):
        main([*command, "--unsafe"])


@pytest.mark.exhaustive
def test_evaluate_table_command(folder, capsys) -> None:
    target = folder / "table.json"
    options = ["--data", str(folder), "--models", "RTN=tiny", "--json", str(target)]
    shots = ["--shots", "piqa=1,gsm8k=0", "--max-new-tokens", "4", "--limit", "1"]
    assert main(["evaluate", "table", "piqa", "gsm8k", *options, *shots]) == 0
    assert "| RTN | QSpec |" in capsys.readouterr().out
    assert [row["method"] for row in json.loads(target.read_text())] == [
        "W4A16", "QSpec", "W4A8", "W4A4",
    ]  # fmt: skip
