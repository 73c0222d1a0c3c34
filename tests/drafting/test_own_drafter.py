"""A drafter needs two names; the guide's works; an incomplete one is refused with its reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.speculation.drafter import check_is_drafter
from specjax.speculation.state import Proposal
from tests.support.random_models import random_model

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "write_a_drafter.md"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Zeros(specjax.Drafter):
    """Its length has no default."""

    draft_length: int = jax.tree.static()

    def propose(self, params, state):
        return Proposal(jnp.zeros((state.tokens.shape[0], self.draft_length), jnp.int32)), state


@pytest.mark.recompiled
def test_the_guides_drafter_works(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    exec(compile(block, str(GUIDE), "exec"), {})
    assert float(capsys.readouterr().out) > 1


def test_the_base_class_does_the_rest(wrong_types: None) -> None:
    drafter = Zeros(3)
    check_is_drafter(drafter)
    assert drafter.draft_length == 3
    assert drafter.init(None, None, 1) is None
    assert drafter.observe("state", None) == "state" and drafter.levels(None) == ()
    drafter.validate(None, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfTable(Zeros):
    """Its one leaf is an array of NumPy, whose comparison has no truth value."""

    draft_length: int = jax.tree.static(default=1)
    table: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(3))


def test_a_drafter_with_one_array_is_one() -> None:
    check_is_drafter(OfTable())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting(Zeros):
    """Its state is one number for all rows."""

    def init(self, params, state, width):
        return jnp.int32(0)


def test_a_state_without_rows_is_refused() -> None:
    """Rows of a continuous batch come and go, each with its own part of the state."""
    with pytest.raises(ValueError, match=r"first axis is the 2 rows .* Counting's .* shape \(\)"):
        specjax.decode(random_model(), [[1, 2], [3, 4]], drafter=Counting(2), max_new_tokens=2)


def test_a_drafter_without_propose_cannot_be_made() -> None:
    class Silent(specjax.Drafter):
        draft_length = 1

    with pytest.raises(TypeError, match=r"abstract method.* '?propose"):
        Silent()


class Endless(specjax.Drafter):
    def propose(self, params, state):
        raise AssertionError


class Stranger:
    draft_length = 1
    propose = Endless.propose


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Endless(), "must have a draft_length, and .*Endless.* has none"),
        (Stranger(), "derive its class from specjax.Drafter"),
        (Zeros, "drafter must be a drafter such as .* got <class"),
        (specjax.QSpec, r"drafter must be a drafter such as .* got <class .*: write QSpec\(…\)$"),
        ("qspec", "drafter must be a drafter such as .* got 'qspec': specjax.drafting.make makes"),
    ],
)
def test_what_is_not_a_drafter_is_refused(drafter: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_is_drafter(drafter)
