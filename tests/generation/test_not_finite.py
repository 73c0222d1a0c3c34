"""NaN and infinite logits end their row with an error, and change no other row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.cli import main
from specjax.model.layers import Linear
from specjax.model.params import Params
from specjax.speculation.drafter import Drafter
from specjax.speculation.sampling import greedy
from specjax.speculation.state import DecodeState, Proposal
from specjax.speculation.verification import _finite
from tests.support.covering import representatives
from tests.support.random_models import CONFIG, random_model
from tests.support.tree_drafter import TreeDrafter
from tests.support.word_tokenizer import WordTokenizer

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5]]
NEW = 8
SOUND = random_model()
NUCLEUS = specjax.Sampling(top_p=0.9)
HUGE = dataclasses.replace(SOUND, lm_head=Linear(jnp.full(SOUND.head.weight.shape, 3e38)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Always(Drafter):
    """Drafts one token again and again, every other round."""

    token: int = dataclasses.field(metadata={"static": True})
    draft_length: int = dataclasses.field(default=3, metadata={"static": True})

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        tokens = jnp.full((state.tokens.shape[0], self.draft_length), self.token, jnp.int32)
        return Proposal(tokens, jnp.where(state.stats.rounds % 2, 0, self.draft_length)), state


@pytest.fixture(scope="module")
def plain() -> specjax.DecodeResult:
    """Returns the sound model's output."""
    return specjax.decode(
        SOUND, PROMPTS, max_new_tokens=NEW, drafter=specjax.Autoregressive(), stop_tokens=()
    )


def without(params: Params, token: int) -> Params:
    """The model that cannot read a token: its logits after it are NaN."""
    return dataclasses.replace(params, embedding=params.embedding.at[token].set(jnp.nan))


def outputs(result: specjax.DecodeResult) -> list[list[int]]:
    rows = zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)
    return [tokens[:length].tolist() for tokens, length in rows]


DRAFTERS = {
    "none": lambda params: specjax.Autoregressive(),
    "chain": lambda params: specjax.LayerSkip(layers=(1,), draft_length=3),
    "tree": lambda params: TreeDrafter(params, (2, 2)),
    "levels": lambda params: specjax.MultiLevel(
        specjax.DraftModel(params, draft_length=3), specjax.PromptLookup()
    ),
}


@pytest.mark.parametrize("name", representatives(DRAFTERS, "chain", "tree"))
def test_a_row_fails_where_its_logits_do(plain: specjax.DecodeResult, name: str) -> None:
    """The output up to there is that of a sound model, and so is the other row's."""
    first, second = outputs(plain)
    at = next(i for i in range(5, len(first)) if first[i] not in (*first[:i], *second))
    params = without(SOUND, first[at])
    result = specjax.decode(
        params, PROMPTS, max_new_tokens=NEW, drafter=DRAFTERS[name](params), stop_tokens=()
    )
    assert outputs(result) == [first[: at + 1], second]
    np.testing.assert_array_equal(result.failed, [True, False])
    np.testing.assert_array_equal(result.stats.generated, [at + 1 - len(PROMPTS[0]), NEW])


def test_a_rejected_draft_fails_nothing(plain: specjax.DecodeResult) -> None:
    """Neither in its own round nor by the cache entries that it leaves behind."""
    unused = next(iter({*range(CONFIG.vocab_size)} - {*np.ravel(plain.tokens).tolist()}))
    result = specjax.decode(
        without(SOUND, unused), PROMPTS, max_new_tokens=NEW, drafter=Always(unused), stop_tokens=()
    )
    assert outputs(result) == outputs(plain)
    assert not result.failed.any()


@pytest.mark.parametrize("sampling", representatives([None, NUCLEUS], None), ids=repr)
def test_no_door_gives_a_text(sampling: specjax.Sampling | None) -> None:
    options = {"max_new_tokens": NEW, "drafter": specjax.PromptLookup(2), "sampling": sampling}
    if sampling is not None:
        options["key"] = jax.random.key(0)
    sentence = "NaN or infinite logits after 0 new tokens"
    for completion, prompt in zip(
        specjax.decode_many(HUGE, PROMPTS, rows=1, **options), PROMPTS, strict=True
    ):
        assert completion.tokens.tolist() == prompt
        assert sentence in completion.error
    with pytest.raises(ValueError, match=sentence):
        specjax.generate(HUGE, WordTokenizer(CONFIG.vocab_size), "w5 w6 w7", **options)
    with pytest.raises(ValueError, match=sentence):
        list(specjax.stream(HUGE, PROMPTS[0], **options))


def test_a_row_without_a_token_is_not_stopped() -> None:
    """Not by a `stop_when` that is true of everything: the row failed, and has no output to end."""
    options = {"max_new_tokens": NEW, "drafter": specjax.PromptLookup(2)}
    (completion,) = specjax.decode_many(HUGE, PROMPTS[:1], stop_when=lambda *_: True, **options)
    assert completion.tokens.tolist() == PROMPTS[0]
    assert "NaN or infinite logits after 0 new tokens" in completion.error


def test_a_row_that_failed_serves_the_next_prompt(plain: specjax.DecodeResult) -> None:
    unused = next(iter({*range(CONFIG.vocab_size)} - {*np.ravel(plain.tokens).tolist()}))
    failing = [[1, unused, *PROMPTS[0]], [1, unused]]  # NaN where a prompt is read, and in a row
    *failed, last = specjax.decode_many(
        without(SOUND, unused), [*failing, PROMPTS[0]], rows=1, max_new_tokens=NEW,
        drafter=specjax.Autoregressive(), stop_tokens=(),
    )  # fmt: skip
    assert all(completion.error is not None for completion in failed)
    assert last.error is None
    assert last.tokens.tolist() == outputs(plain)[0]


def test_tokens_that_end_a_row_first_are_no_failure(plain: specjax.DecodeResult) -> None:
    """A stop token, a limit, or a text to stop at, all at the last token with finite logits."""
    first = outputs(plain)[0]
    at = next(i for i in range(5, len(first)) if first[i] not in first[:i])
    options = {"drafter": Always(first[at]), "stop_tokens": (), "max_new_tokens": NEW}
    new = at + 1 - len(PROMPTS[0])
    for more in (
        {"stop_tokens": (first[at],)},
        {"max_new_tokens": new},
        {"stop_when": lambda number, output: first[at] in output},
    ):
        (completion,) = specjax.decode_many(
            without(SOUND, first[at]), PROMPTS[:1], **options | more
        )
        assert completion.error is None
        assert completion.tokens.tolist() == first[: at + 1]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_one_value_is_enough(value: float) -> None:
    """In any place of any shape; -inf is a token that cannot be chosen."""
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (2, 1), (3, 4)):
        logits = rng.normal(size=(*shape, 1000)).astype(np.float32)
        logits[0, 0, :999] = -np.inf
        assert _finite(jnp.asarray(logits)).all()
        for token in rng.integers(0, 1000, 5):
            spoilt = logits.copy()
            spoilt[-1, -1, token] = value
            finite = np.asarray(jax.jit(_finite)(spoilt))
            assert finite.sum() == finite.size - 1
            assert not finite[-1, -1]
    assert not _finite(jnp.full((1, 1, 300), -jnp.inf)).any()
    assert greedy(jnp.asarray(logits))[0, 0] == 999


def test_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specjax.load", lambda source, **_: HUGE)
    monkeypatch.setattr("specjax.load_tokenizer", lambda source: WordTokenizer(CONFIG.vocab_size))
    command = ["generate", "w5 w6 w7", "--drafter", "prompt-lookup", "--max-new-tokens", "8"]
    assert main(command) == 1
    output = capsys.readouterr()
    assert output.out == "w5 w6 w7"
    assert output.err.startswith("specjax: the model gave NaN or infinite logits after 0 new")
