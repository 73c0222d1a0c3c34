"""Writes the golden files: `python -m tests.golden.make [case ...]`. See README.md beside this."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tests.golden import reference
from tests.golden.cases import CASES, NEW_TOKENS, Case
from tests.golden.reference import padded, padded_logits

ROOT = Path(__file__).parent


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in names or CASES:
        shutil.rmtree(ROOT / name, ignore_errors=True)
        write(ROOT / name, name, CASES[name])
        print(name, sum(file.stat().st_size for file in (ROOT / name).iterdir()), "bytes")


def write(directory: Path, name: str, case: Case) -> None:
    """One case: the model's directory, golden.npz and, for some, config_older.json."""
    model, prompts = reference.make(case, first_seed=sum(name.encode()))
    greedy = [reference.greedy(model, prompt) for prompt in prompts]
    stop = stop_tokens(greedy, case.stop_count)
    stopped = [reference.greedy(model, prompt, stop) for prompt in prompts]
    reference.save(model, directory, stop)
    np.savez_compressed(
        directory / "golden.npz",
        prompts=padded(prompts, max(case.lengths)),
        prompt_lengths=np.array(case.lengths, np.int32),
        logits=padded_logits(model, prompts),
        greedy=padded(greedy, NEW_TOKENS),
        stopped=padded(stopped, NEW_TOKENS),
        stopped_counts=np.array([len(tokens) for tokens in stopped], np.int32),
    )
    if case.older is not None:
        write_older_config(directory, case.older)
    check_stored(directory, model, prompts[-1])


def stop_tokens(greedy: list[torch.Tensor], count: int) -> list[int]:
    """For each of the first `count` prompts, the token that ends it about half way."""
    half = NEW_TOKENS // 2
    return [int(tokens[half]) for tokens in greedy[:count]]


def write_older_config(directory: Path, more: dict[str, Any]) -> None:
    """config_older.json: the same model as transformers 4 would have described it."""
    config = json.loads((directory / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if scaling["rope_type"] == "linear":  # the name before 4.43
        scaling["type"] = scaling.pop("rope_type")
    config["torch_dtype"] = config.pop("dtype")
    for newer in ("head_dim", "layer_types"):  # derived from other fields in these cases
        config.pop(newer, None)
    config |= {"transformers_version": "4.44.0"} | more
    (directory / "config_older.json").write_text(json.dumps(config, indent=2) + "\n")


def check_stored(directory: Path, model: PreTrainedModel, prompt: torch.Tensor) -> None:
    """Checks that transformers reads the written model and gives the same logits to the bit."""
    expected = reference.logits_of(model, prompt)
    for file in directory.glob("config*.json"):
        config = type(model.config).from_json_file(file)
        stored = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        if not np.array_equal(reference.logits_of(stored.eval(), prompt), expected):
            raise AssertionError(f"{file} does not describe the model that it was written for")


if __name__ == "__main__":
    main(sys.argv[1:])
