"""`specjax.bench`: what is counted and compared, what a killed run keeps, and the tables."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax.bench import Subject, bench, read_cells
from specjax.bench.cells import PLAIN, Cell, merged
from specjax.bench.environment import environment
from specjax.bench.table import format_cells
from specjax.bench.turns import geometric_mean, take_turns
from tests.support.random_models import quantized_model, random_model, random_prompts

PARAMS = quantized_model(group_size=32)
PROMPTS = random_prompts((9, 12, 5, 16), PARAMS.config.vocab_size)
DRAFTERS = {
    "qspec": specjax.QSpec(3, "a4"),
    "lookahead": specjax.Lookahead(ngram=3, window=2, guesses=2, capacity=64),
}
OPTIONS = {"rows": (2,), "max_new_tokens": 16, "turns": 2}


def _subject(**texts: list[list[int]]) -> Subject:
    return Subject("random", PARAMS, DRAFTERS, texts)


def _bench(out: Path | None = None, **options) -> list[Cell]:
    subject = _subject(first=PROMPTS, second=PROMPTS[:2])
    return bench([subject], out=out, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Cell]]:
    out = tmp_path_factory.mktemp("bench") / "results.jsonl"
    return out, _bench(out)


def test_every_cell_is_measured(cells) -> None:
    found = [(cell.texts, cell.drafter) for cell in cells[1]]
    assert found == [(texts, name) for texts in ("first", "second") for name in (PLAIN, *DRAFTERS)]
    assert [cell.prompts for cell in cells[1]] == [4, 4, 4, 2, 2, 2]
    assert [len(cell.ratios) for cell in cells[1]] == [2, 2, 2, 1, 1, 1]
    assert all(cell.identical == cell.prompts for cell in cells[1])
    assert all(ratio == 1 for cell in cells[1] if cell.drafter == PLAIN for ratio in cell.ratios)


def test_outputs_that_differ_are_counted(monkeypatch) -> None:
    def decode(*given, drafter, **options) -> specjax.DecodeResult:
        result = specjax.decode(*given, drafter=drafter, **options)
        change = int(isinstance(drafter, specjax.QSpec))
        return dataclasses.replace(result, tokens=result.tokens.at[0, -1].add(change))

    monkeypatch.setattr("specjax.bench.grid.decode", decode)
    cells = bench([_subject(one=PROMPTS[:2])], **OPTIONS)
    assert [(cell.drafter, cell.identical) for cell in cells] == [
        (PLAIN, 2), ("qspec", 1), ("lookahead", 2)
    ]  # fmt: skip


def test_programs_may_be_forgotten_after_every_group(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr("specjax.bench.grid.forget_programs", lambda: asked.append(1))
    subject = Subject("random", PARAMS, {}, {"first": PROMPTS[:1], "second": PROMPTS[:1]})
    bench([subject], max_new_tokens=2, turns=1)
    assert len(asked) == 2


@pytest.mark.parametrize(("prompts", "answers"), [([[1, 7]], 0), ([[1, 7], [1, 2]], 2)])
def test_a_model_that_fails_is_not_measured(prompts: list[list[int]], answers: int) -> None:
    """It cannot read a token. The last prompt of a width is answered once before any is timed."""
    sound = random_model()
    params = dataclasses.replace(sound, embedding=sound.embedding.at[7].set(np.nan))
    shown: list[tuple[int, int]] = []
    message = "damaged, one, rows=1: the model gave NaN or infinite logits after 0 new tokens"
    with pytest.raises(ValueError, match=message):
        bench(
            [Subject("damaged", params, {}, {"one": prompts})], max_new_tokens=1, turns=1,
            progress=lambda *each: shown.append(each),
        )  # fmt: skip
    assert len(shown) == answers


def test_counts_are_those_of_decode(cells) -> None:
    results = {
        name: [
            specjax.decode(
                PARAMS, PROMPTS[first : first + 2], drafter=drafter, max_new_tokens=16
            ).stats
            for first in (0, 2)
        ]
        for name, drafter in DRAFTERS.items()
    }
    for cell in cells[1][1:3]:
        for name in ("rounds", "drafted", "tested", "accepted", "generated"):
            own = sum(int(getattr(stats, name).sum()) for stats in results[cell.drafter])
            assert getattr(cell, name) == own, (cell.drafter, name)


def test_halves_of_rounds_are_the_rounds_of_decode(cells) -> None:
    for cell in cells[1]:
        assert sum(cell.tested_at) == cell.tested
        assert sum(cell.kept_at) == cell.accepted
        assert list(cell.tested_at) == sorted(cell.tested_at, reverse=True)
        assert (cell.draft_seconds > 0) and (cell.verify_seconds > 0)


def test_bytes_count_what_is_held_once() -> None:
    cast = specjax.quantize(specjax.dequantize(PARAMS), "mxfp4", lm_head=True)
    drafters = {"shared": specjax.DraftModel(cast, 2), "qspec": specjax.QSpec(2)}
    subject = Subject("random", PARAMS, drafters, {"one": PROMPTS[:1]})
    plain, shared, qspec = bench([subject], max_new_tokens=8, turns=1)
    assert plain.target_bytes == PARAMS.nbytes
    assert (plain.draft_bytes, qspec.draft_bytes) == (0, 0)
    assert 0 < shared.draft_bytes <= cast.nbytes
    assert shared.state_bytes > qspec.state_bytes >= plain.state_bytes


def test_a_killed_run_goes_on(cells, tmp_path: Path) -> None:
    lines = cells[0].read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join(lines[:4]) + lines[4][:50])  # the second group is missing
    told: list[tuple[int, int]] = []
    again = _bench(torn, progress=lambda *state: told.append(state))
    assert again[:3] == cells[1][:3]
    assert torn.read_bytes().splitlines(keepends=True)[:4] == lines[:4]
    assert told[0] == (18, 27) and told[-1] == (27, 27)
    assert [cell.generated for cell in again] == [cell.generated for cell in cells[1]]
    complete = torn.read_bytes()
    assert _bench(torn) == again and torn.read_bytes() == complete


def test_a_group_is_kept_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    """The first group's cells are in the file while the second one is measured."""
    out, kept = tmp_path / "results.jsonl", list[Cell]()

    def end(done: int, _: int) -> None:
        if done > 18:
            kept.extend(read_cells(out)[1])
            raise InterruptedError

    with pytest.raises(InterruptedError):
        _bench(out, progress=end)
    assert [(cell.texts, cell.drafter) for cell in kept] == [
        ("first", name) for name in (PLAIN, *DRAFTERS)
    ]
    assert read_cells(out)[1] == kept


def test_a_group_without_all_its_cells_is_measured_again(cells, tmp_path: Path) -> None:
    lines = cells[0].read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join(lines[:6]))
    again = _bench(torn)
    assert again[:3] == cells[1][:3] and again[3] != cells[1][3]
    assert len(torn.read_bytes().splitlines()) == 7


def test_results_of_other_settings_are_refused(cells) -> None:
    with pytest.raises(ValueError, match="holds results of another run, with turns 2; this one"):
        _bench(cells[0], turns=1)


def test_settings_name_machine_versions_and_commit(cells) -> None:
    settings, found = read_cells(cells[0])
    assert found == cells[1]
    assert {name: settings[name] for name in environment()} == environment()
    assert settings["specjax"] == specjax.__version__ and settings["cores"] >= 1
    if (Path(__file__).parents[2] / ".git").exists():
        assert settings["commit"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "turns must be at least 1, got 0"),
        ({"rows": (0,)}, "rows must be at least 1, got 0"),
        ({"rows": (3,)}, "second must have at least 3 prompts for a batch of 3, got 2"),
        ({"rows": (1, 1)}, "rows different numbers"),
        ({"max_new_tokens": 600}, "max_new_tokens=600"),
        ({"cache_bits": 5}, "cache_bits"),
    ],
)
def test_bad_arguments_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _bench(**options)


def test_a_drafter_is_not_named_plain() -> None:
    with pytest.raises(ValueError, match="drafters must not hold the name 'plain'"):
        Subject("random", PARAMS, {PLAIN: specjax.QSpec()}, {"one": PROMPTS})


def _cell(drafter: str, *ratios: float, texts: str = "one", **changes) -> Cell:
    values = {
        "model": "m", "texts": texts, "rows": 1, "drafter": drafter, "draft_length": 2,
        "prompts": len(ratios), "identical": len(ratios), "ratios": ratios, "seconds": 2.0,
        "rounds": 10, "drafted": 20, "tested": 16, "accepted": 10, "generated": 20,
        "tested_at": (10, 6), "kept_at": (6, 4), "draft_seconds": 0.5, "verify_seconds": 1.5,
        "target_bytes": 100, "draft_bytes": 10, "state_bytes": 5,
    }  # fmt: skip
    return Cell(**{**values, **changes})


def test_numbers_follow_from_the_sums() -> None:
    numbers = _cell("a", 2.0, 0.5).numbers()
    assert numbers["speedup"] == pytest.approx(1) and numbers["speedup_low"] == pytest.approx(0.5)
    assert (numbers["tokens_per_second"], numbers["tokens_per_round"]) == (10, 2)
    assert (numbers["kept"], numbers["kept_by_place"]) == (0.5, [0.6, pytest.approx(2 / 3)])
    assert (numbers["draft_seconds_per_token"], numbers["bytes"]) == (0.025, 115)


def test_cells_of_several_sets_add_up() -> None:
    both = merged([_cell("a", 2.0, 3.0), _cell("a", 4.0, tested_at=(3,), kept_at=(1,))], "all")
    assert (both.prompts, both.ratios, both.rounds) == (3, (2.0, 3.0, 4.0), 20)
    assert (both.tested_at, both.kept_at) == ((13, 6), (7, 4))
    assert both.state_bytes == 5 and both.seconds == 4


def test_the_table_begins_with_losses() -> None:
    cells = [
        _cell("fast", 2.0, 2.0), _cell("slow|er", 0.5), _cell("fast", 1.5, texts="two", identical=0)
    ]  # fmt: skip
    settings = {"processor": "P", "cores": 2, "commit": None, "max_new_tokens": 64}
    where, _, header, _, *lines = format_cells([(settings, cells)]).splitlines()
    assert where == "processor P, cores 2; up to 64 new tokens, greedy"
    assert header.startswith("| model | prompts | rows | drafter | N | tokens/s | speed-up |")
    assert [line.split(" | ")[3] for line in lines] == ["slow\\|er", "fast", "fast", "fast"]
    assert [line.split(" | ")[1] for line in lines] == ["one", "two", "all", "one"]
    assert "| 0.50 | – | 0.500 | 0.60 0.67 | 2.00 |" in lines[0] and "| 0 of 1 |" in lines[1]
    other = format_cells([(settings, cells[:1]), ({**settings, "cores": 4}, cells[1:2])])
    assert other.count("| model |") == 2


def test_a_set_that_two_runs_measured_counts_once() -> None:
    """Runs with other drafters share plain decoding, and those with other caches share no table."""
    runs = [
        [_cell(PLAIN, 1.0, identical=same), _cell(name, 2.0)] for name, same in (("a", 0), ("b", 1))
    ]
    settings = {"max_new_tokens": 64, "cache_bits": 16}
    together = format_cells([(settings, run) for run in runs])
    assert together.startswith("cache_bits 16; up to") and "| all |" not in together
    apart = format_cells([(settings, runs[0]), ({**settings, "cache_bits": 4}, runs[1])])
    assert apart.count("| model |") == 2
    two = format_cells([(settings, [*runs[0], *runs[1], _cell(PLAIN, 1.0, texts="two")])])
    (line,) = (line for line in two.splitlines() if "| all |" in line)
    assert line.endswith("| yes |")  # and not of three prompts


def test_turns_begin_with_another_program_each_time() -> None:
    order: list[tuple[str, int]] = []
    programs = {
        name: lambda number, name=name: order.append((name, number)) or np.float32(number)
        for name in "ab"
    }
    ran: list[None] = []
    seconds, outputs = take_turns(programs, [1, 2, 3], turns=2, ran=lambda: ran.append(None))
    assert [name for name, _ in order[::2]] == ["a", "b"] * 3
    assert sorted(order) == sorted([(name, n) for name in "ab" for n in (1, 2, 3)] * 2)
    assert seconds["a"].shape == (2, 3) and outputs["b"] == [1, 2, 3] and len(ran) == 12


def test_one_ratio_has_no_interval_and_equal_ones_leave_no_doubt() -> None:
    assert geometric_mean([2.0]) == (2.0, None, None)
    assert geometric_mean([2.0, 2.0, 2.0]) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = geometric_mean(np.exp(random.normal(0.3, 0.2, 60)))
        covered += found.low <= np.exp(0.3) <= found.high
    assert 180 <= covered <= 199


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 2 of .* does not hold results of specjax bench: give another file"),
        ('{"task": "t", "id": "i", "model": "m"}', "has no texts in a cell: give another file"),
        ('{"task": "t", "id": "i", "ratios": [0]}', r"ratios in line 2 of .* must be a number"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({"specjax_bench": 1}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_cells(file)


def test_no_file_of_results_at_all_is_refused(tmp_path: Path) -> None:
    for content in ("", "once upon a time\n", '{"specjax_results": 1}\n', "[1]\n"):
        (tmp_path / "file").write_text(content)
        with pytest.raises(ValueError, match="does not hold results of specjax bench"):
            read_cells(tmp_path / "file")
    with pytest.raises(OSError, match=os.strerror(2)):
        read_cells(tmp_path / "missing")
