"""The reference: transformers' models with random weights, in float32 with torch."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.golden.cases import NEW_TOKENS, Case

LEAST_GAP = 1e-3  # between the two best logits of every generated token
LEAST_DISTINCT = 8  # distinct tokens in every continuation


def make(case: Case, first_seed: int) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """The model and prompts of the first seed whose greedy continuations make a sharp test."""
    for seed in itertools.count(first_seed):
        torch.manual_seed(seed)
        model = random_model(case)
        prompts = [torch.randint(1, case.config.vocab_size, (n,)) for n in case.lengths]
        if all(_is_sharp(model, prompt) for prompt in prompts):
            return model, prompts
    raise AssertionError("unreachable")


def random_model(case: Case) -> PreTrainedModel:
    """Weights that bfloat16 holds exactly, large enough for decisive logits."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(case.config), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        parameter.data = _random_weight(name, parameter).bfloat16().float()
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


def _random_weight(name: str, like: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(like)
    if like.ndim == 1:
        return 0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.5 * noise
    return 1.5 * noise / like.shape[1] ** 0.5


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    """tokens: int64[T] -> f32[T, V], in one pass without a cache."""
    return model(tokens[None], use_cache=False).logits[0].numpy()


def padded_logits(model: PreTrainedModel, prompts: list[torch.Tensor]) -> np.ndarray:
    """f32[B, T, V], zeros behind each prompt."""
    width = max(len(prompt) for prompt in prompts)
    rows = (logits_of(model, prompt) for prompt in prompts)
    return np.stack([np.pad(row, ((0, width - len(row)), (0, 0))) for row in rows])


def padded(rows: list[torch.Tensor], width: int) -> np.ndarray:
    """int32[B, width], zeros behind each row."""
    return np.stack([np.pad(row.int().numpy(), (0, width - len(row))) for row in rows])


@torch.no_grad()
def greedy(
    model: PreTrainedModel, prompt: torch.Tensor, stop: list[int] | None = None
) -> torch.Tensor:
    """prompt: int64[T] -> the tokens that follow it, a stop token included."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=stop,
    )
    return out[0, len(prompt) :]


def save(model: PreTrainedModel, directory: Path, stop: list[int]) -> None:
    """Writes the model as Hugging Face does, its weights in bfloat16, its dtype float32."""
    half = copy.deepcopy(model).bfloat16()
    ends = stop[0] if len(stop) == 1 else stop
    half.config.eos_token_id = half.generation_config.eos_token_id = ends
    half.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))


def _is_sharp(model: PreTrainedModel, prompt: torch.Tensor) -> bool:
    """Whether no continuation is a short loop or hangs on a rounding error."""
    new = greedy(model, prompt)
    if len(new.unique()) < LEAST_DISTINCT:
        return False
    logits = logits_of(model, torch.cat((prompt, new)))[len(prompt) - 1 : -1]
    best, second = np.sort(logits)[:, :-3:-1].T
    return bool((best - second).min() > LEAST_GAP)
