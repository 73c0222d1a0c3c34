"""Checks that `specjax evaluate` gives the right scores, and that a killed run resumes.

table      QSpec's table 3 on one model, by default quantized by Atom and by QuaRot. No answer of
           QSpec may differ from W4A16's. Scores have the items that they count and Wilson's 95 %
           interval beside them.
harness    PIQA's choices and GSM8K's answers, compared item by item with lm-evaluation-harness
           on specjax (`pip install "specjax[lm-eval]"`).
kills      A run that is killed ten times at random and resumed each time. Its file must equal that
           of an undisturbed run, byte for byte.

python -m benchmarks.quality.evaluation --json OUT
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import specjax
from benchmarks.support.common import parser, table, write
from checkpoints_tools.quantization.calibration import calibration_tokens
from checkpoints_tools.quantization.recipe import Recipe
from specjax.evaluation import evaluate
from specjax.evaluation.table import fidelity_rows

TASKS = ("gsm8k", "humaneval", "piqa", "winogrande", "wikitext2")
SCHEMES = {  # forms of a model, and the methods that make them
    "16 bits": None, "as loaded": None, "RTN": "rtn", "Atom": "atom", "QuaRot": "quarot+gptq",
}  # fmt: skip
KILLS = 10
HARNESS_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
{rest}
"""
HARNESS_TASKS = {
    "piqa": """
output_type: multiple_choice
doc_to_text: "Question: {{goal}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{[sol1, sol2]}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "gsm8k": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "\\nQuestion:"], max_gen_toks: 64}
metric_list: [{metric: exact_match}]
""",
}


def main() -> int:
    options = _options()
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        new = [{"part": part, **row} for row in PARTS[part](options)]
        print(table(new, list(new[0])), flush=True)
        rows += new
        write(options.json, rows)
    return int(any(row["differing"] for row in rows if row.get("method") not in ("W4A8", "W4A4")))


def _options() -> Any:
    parse = parser(__doc__)
    add = parse.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--model", default="tiny-16bit", help="of the table: in 16 bits, or smollm2")
    add("--schemes", nargs="+", default=["Atom", "QuaRot"], choices=SCHEMES)
    add("--tasks", nargs="+", default=TASKS, help="of the table")
    add("--shots", type=int, default=1, help="worked examples before each item of the table")
    add("--chat", action="store_true", help="ask the table's items in the model's chat format")
    add("--work", type=Path, help="folder that keeps the table's answers, to go on from")
    add("--limit", type=int, default=24, help="items per task")
    add("--max-new-tokens", type=int, default=64)
    add("--batch", type=int, default=8)
    return parse.parse_args()


def _table(options: Any) -> list[dict[str, Any]]:
    tokenizer = specjax.load_tokenizer(options.model)
    rows = []
    for scheme in options.schemes:
        for row in fidelity_rows(
            scheme, _model(scheme, tokenizer, options), tokenizer, options.tasks, options.data,
            out=options.work, rows=options.batch, limit=options.limit, shots=options.shots,
            max_new_tokens=options.max_new_tokens, chat=options.chat,
        ):  # fmt: skip
            counts = {"answers": len(row.compared), "differing": row.compared.count(False)}
            scores: dict[str, Any] = {}
            for result in row.results:
                (metric, score), *_ = result.metrics.items()
                scores[result.task] = score
                if metric != "perplexity":
                    items = len(result.records) - result.refused
                    low, high = _interval(score, items)
                    scores |= {
                        f"{result.task}_items": items,
                        f"{result.task}_low": low,
                        f"{result.task}_high": high,
                    }
            rows.append({"model": scheme, "method": row.method, **counts, **scores})
            print(rows[-1], flush=True)
    return rows


def _interval(share: float, items: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, which has a width also where the share is 0 or 1."""
    least = 1.96**2 / items
    middle = share + least / 2
    half = 1.96 * ((share * (1 - share) + least / 4) / items) ** 0.5
    return (middle - half) / (1 + least), (middle + half) / (1 + least)


def _model(scheme: str, tokenizer: Any, options: Any) -> specjax.Params:
    """The model in one of the forms of `--schemes`."""
    loaded = specjax.load(options.model)
    method = SCHEMES[scheme]
    if scheme == "as loaded":
        return loaded
    model = specjax.dequantize(loaded)
    if method is None:
        return model
    lines = (options.data / "prompts" / "gsm8k_train.jsonl").read_text().splitlines()
    calibration = calibration_tokens("\n".join(lines[:400]), tokenizer, length=256)
    needed = Recipe(method).needs_calibration
    return specjax.quantize(model, method, calibration=calibration if needed else None)


def _harness(options: Any) -> list[dict[str, Any]]:
    params, tokenizer = specjax.load("tiny"), specjax.load_tokenizer("tiny")
    samples = _harness_samples(params, tokenizer, options)
    settings = {
        "rows": options.batch, "limit": options.limit, "shots": 0, "max_new_tokens": 64,
    }  # fmt: skip
    chosen, written = evaluate(params, tokenizer, ["piqa", "gsm8k"], options.data, **settings)
    differing = {
        "piqa": sum(
            bool(theirs[metric]) != own[name]
            for theirs, own in zip(samples["piqa"], chosen.records, strict=True)
            for metric, name in (("acc", "correct"), ("acc_norm", "correct per character"))
        ),
        "gsm8k": sum(
            theirs["filtered_resps"] != [own["text"]]
            for theirs, own in zip(samples["gsm8k"], written.records, strict=True)
        ),
    }
    return [
        {"task": task, "items": options.limit, "differing": count}
        for task, count in differing.items()
    ]


def _harness_samples(params: Any, tokenizer: Any, options: Any) -> dict[str, list[dict[str, Any]]]:
    """The harness's records of the items of every task, in order."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before its libraries are imported
    import lm_eval
    from lm_eval.tasks import TaskManager

    from specjax.evaluation.lm_eval import SpecjaxLM

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for name, rest in HARNESS_TASKS.items():
            data = options.data / "prompts" / ("piqa" if name == "piqa" else "gsm8k_test")
            file = Path(folder) / f"{name}.jsonl"
            lines = data.with_suffix(".jsonl").read_text().splitlines()
            file.write_text("\n".join(lines[: options.limit]) + "\n")
            text = HARNESS_TASK.format(name=name, file=file, cache=folder, rest=rest)
            (Path(folder) / f"{name}.yaml").write_text(text)
        samples = lm_eval.simple_evaluate(
            model=SpecjaxLM(params, tokenizer, rows=options.batch), tasks=list(HARNESS_TASKS),
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
        )["samples"]  # fmt: skip
    return {name: sorted(each, key=lambda one: one["doc_id"]) for name, each in samples.items()}


def _kills(options: Any) -> list[dict[str, Any]]:
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole.jsonl", Path(folder) / "killed.jsonl"
        subprocess.run(_command(options, whole), check=True, stdout=subprocess.DEVNULL)
        items, kept = len(whole.read_bytes().splitlines()) - 1, []
        for _ in range(KILLS):
            kept.append(_kill(options, killed, rng))
        subprocess.run(_command(options, killed), check=True, stdout=subprocess.DEVNULL)
        same = whole.read_bytes() == killed.read_bytes()
    return [{"items": items, "kept": kept, "differing": int(not same)}]


def _command(options: Any, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "specjax.cli", "evaluate", *TASKS, "--model", "tiny", "--data",
        str(options.data), "--limit", "24", "--rows", "4", "--shots", "1", "--max-new-tokens",
        str(options.max_new_tokens), "--out", str(out),
    ]  # fmt: skip


def _kill(options: Any, out: Path, rng: random.Random) -> int:
    """Starts a run and kills it some items later. Returns the number of lines in its file."""
    lines = len(out.read_bytes().splitlines()) if out.exists() else 1
    process = subprocess.Popen(
        _command(options, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    goal = lines + rng.randint(1, 6)
    while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < goal):
        time.sleep(rng.random() / 50)
    time.sleep(rng.random() / 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return out.read_bytes().count(b"\n")


PARTS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "table": _table,
    "harness": _harness,
    "kills": _kills,
}

if __name__ == "__main__":
    sys.exit(main())
