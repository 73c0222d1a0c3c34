"""specjax as a model of EleutherAI's lm-evaluation-harness (`pip install "specjax[lm-eval]"`).

    lm_eval.simple_evaluate(model=SpecjaxLM(params, tokenizer, rows=8), tasks=["piqa"])

`specjax lm-eval` is the harness's command line with this model in it. Texts are generated with the
given drafter; likelihoods are the target's own, without a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from specjax.checks import check_seed
from specjax.evaluation.likelihood import log_likelihoods, rolling_log_likelihoods
from specjax.evaluation.progress_bar import progress_bar
from specjax.generation.batching import complete
from specjax.generation.text import StopStrings, cut, output_text
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import Sampling

if TYPE_CHECKING:
    from checkpoints_tools.tokenizer import Tokenizer

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


class SpecjaxLM(TemplateLM):  # type: ignore[misc]  # the harness is untyped
    """Answers the harness's three kinds of requests, and applies chat templates on request.

    Args:
      params: the model.
      tokenizer: its tokenizer, as `specjax.load_tokenizer` gives it.
      drafter: how tokens are proposed where text is generated; default Auto().
      rows: texts per pass.
      max_length: most tokens of a text that are read; None: the model's number of positions. A
        longer context loses its first tokens.
      cache_bits: bits per KV cache entry: 16, 8 or 4.
      seed: seed of the random key, for tasks that sample.
    """

    def __init__(
        self,
        params: Params,
        tokenizer: Tokenizer,
        *,
        drafter: Drafter | None = None,
        rows: int = 8,
        max_length: int | None = None,
        cache_bits: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._params, self._tokenizer = params, tokenizer
        self._drafter, self._rows, self._cache_bits = drafter, rows, cache_bits
        positions = params.config.max_position_embeddings
        self._max_length = positions if max_length is None else max_length
        self._key = jax.random.key(check_seed("seed", seed))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if not self._params.config.stop_tokens:
            raise ValueError("the model's configuration names neither a first nor a last token")
        return self._params.config.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: the one that begins texts, or else the one that ends them."""
        first = self._params.config.bos_id
        return self.eot_token_id if first is None else first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids. The token that begins texts comes once, also where the text spells it."""
        ids = self._tokenizer.encode(string, add_special_tokens is not False)
        twice = add_special_tokens is None and ids[:2] == [self._params.config.bos_id] * 2
        return ids[1:] if twice else ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        with progress_bar(name="loglikelihood", leave=True, disable=disable_tqdm) as show:
            scores = log_likelihoods(
                self._params, pairs, rows=self._rows, cache_bits=self._cache_bits,
                max_length=self._max_length, progress=show,
            )  # fmt: skip
        for request, result in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probabilities of whole texts in nats, all tokens after `prefix_token_id`."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        with progress_bar(name="loglikelihood_rolling", leave=True, disable=disable_tqdm) as show:
            sums = rolling_log_likelihoods(
                self._params, texts, prefix=self.prefix_token_id, rows=self._rows,
                cache_bits=self._cache_bits, max_length=self._max_length, progress=show,
            )  # fmt: skip
        for request, result in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to the first of its `until` strings.

        Requests with the same generation arguments are decoded together.
        """
        groups: dict[_Setting, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_setting(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        with progress_bar(name="generate_until", leave=True, disable=disable_tqdm) as show:
            for setting, numbers in groups.items():
                contexts = [requests[number].args[0] for number in numbers]
                for place, text in self._generate(contexts, setting):
                    number = numbers[place]
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    show(len(texts), len(requests))
        return [texts[number] for number in range(len(requests))]

    def _generate(self, contexts: Sequence[str], setting: _Setting) -> Iterator[tuple[int, str]]:
        """Yields each context's number and continuation as soon as it is finished."""
        room = self._max_length - setting.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={setting.max_new_tokens} leaves no room for a prompt: the model "
                f"reads {self._max_length} tokens"
            )
        encoded = (self.tok_encode(context) or [self.prefix_token_id] for context in contexts)
        prompts = [tokens[-room:] for tokens in encoded]
        until = setting.until
        stop_when = StopStrings(self._tokenizer, prompts, until) if until else None
        for number, completion in complete(
            self._params, prompts, rows=self._rows, max_new_tokens=setting.max_new_tokens,
            drafter=self._drafter, sampling=setting.sampling,
            key=None if setting.sampling is None else self._key,
            stop_tokens=self._stop_tokens(until), cache_bits=self._cache_bits,
            stop_when=stop_when,
        ):  # fmt: skip
            if completion.error is not None:
                raise ValueError(completion.error)
            new = completion.tokens[len(prompts[number]) :].tolist()
            yield number, self._text(prompts[number], new, until)

    def _text(self, prompt: Sequence[int], new: list[int], until: Sequence[str]) -> str:
        """The text of new tokens, up to the first of the strings."""
        stop_tokens = self._params.config.stop_tokens
        return cut(output_text(self._tokenizer, prompt, new, stop_tokens), until)

    def _stop_tokens(self, until: Sequence[str]) -> tuple[int, ...]:
        """The model's own, and special tokens among the strings: texts do not show those."""
        named = (token for name, token in self._tokenizer.special_tokens().items() if name in until)
        return tuple(dict.fromkeys((*self._params.config.stop_tokens, *named)))

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's identity in the harness's cache of requests."""
        return repr(self._tokenizer)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The checkpoint's template in Jinja, for the harness's records."""
        if isinstance(chat_template, str):
            raise ValueError(
                f"apply_chat_template must be True or False, got {chat_template!r}: specjax "
                "applies the checkpoint's own template only"
            )
        return self._tokenizer.chat_template if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation in the checkpoint's template."""
        return self._tokenizer.chat(chat_history, answer=add_generation_prompt)


class _Setting(NamedTuple):
    """How a continuation is generated."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling | None


def _setting(given: dict[str, Any]) -> _Setting:
    """Reads the harness's generation arguments. Raises ValueError for one that is unknown."""
    chosen = dict(normalize_gen_kwargs(given))
    if chosen.get("num_beams") == 1:
        del chosen["num_beams"]
    if unknown := chosen.keys() - _KNOWN:
        raise ValueError(
            f"generation arguments must be among {', '.join(sorted(_KNOWN))}, "
            f"got {', '.join(sorted(unknown))}"
        )
    sampling = None
    if chosen["do_sample"] and chosen.get("temperature", 1.0) != 0:
        names = {"temperature", "top_k", "top_p", "min_p"} & chosen.keys()
        values = {name: chosen[name] for name in names if name != "top_k" or chosen[name] != 0}
        sampling = Sampling(**values)
    until = tuple(end for end in chosen["until"] if end)
    return _Setting(until, chosen["max_gen_toks"], sampling)
