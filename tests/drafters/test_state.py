"""What a drafter knows after a round: the accepted path's tokens and features, whatever way the tree grew.

Planted mistakes that these tests saw (2026-12-01): the features of the tree's first rows in place of the accepted path's, in
`round.verify`; and those below.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jaxspec.drafters import registry
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.eagle.drafter import EagleDrafter
from jaxspec.drafters.mtp.drafter import MtpDrafter
from jaxspec.drafters.standalone.drafter import StandaloneDrafter
from jaxspec.testing import check_state
from tests.engine.cases import NAMES, Case, case_of, texts

BRANCHING = ("standalone tree", "eagle3 tree", "mtp one layer", "uno tree")
"""Trees in which paths other than the first rows are accepted, so that the test sees which rows are taken."""
ALWAYS = ("eagle3 tree", "dflash chain")  # the tree of a draft model goes through `check_drafter` in tests/test_testing.py


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_after_a_round_a_drafter_knows_what_a_prompt_would_have_told_it(name):
    made = case_of(name)
    given = {"algorithm": made.algorithm, "draft": made.draft, "spec": made.spec}
    branched = check_state(made.params, texts(name, (5, 9, 2)), **given, max_new_tokens=16)
    assert branched > 0 or name not in BRANCHING


def mistaken(kind: type, made: Case, **mistake) -> tuple[Drafter, object]:
    """The drafter of a case with a mistake in its `update`, and its parameters."""
    _, _, drafter, tree = registry.prepare(made.algorithm, made.params, made.draft, made.spec)
    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    return type("Mistaken", (kind,), mistake)(**fields), tree


def first_rows(self, params, state, ctx, accepted, features, n_accepted):
    """The features of other nodes, the root's first of all."""
    return super(type(self), self).update(params, state, ctx, accepted, features[:, :1] + 0 * features, n_accepted)


def without_the_first(self, params, state, ctx, accepted, features, n_accepted):
    """Drops the first accepted token."""
    return super(type(self), self).update(
        params, state, ctx, jnp.roll(accepted, -1, 1), features, jnp.maximum(n_accepted - 1, 0)
    )


MISTAKES = {
    "EAGLE-3, features": ("eagle3 tree", EagleDrafter, first_rows),
    "MTP, features": ("mtp one layer", MtpDrafter, first_rows),
    "STANDALONE, tokens": ("standalone tree", StandaloneDrafter, without_the_first),
}


@pytest.mark.parametrize(
    "name, kind, update",
    [pytest.param(*m, id=n, marks=[pytest.mark.slow] if n.startswith("MTP") else []) for n, m in MISTAKES.items()],
)
def test_a_mistake_in_what_a_round_tells_the_drafter_is_seen(name, kind, update):
    made = case_of(name)
    drafter, tree = mistaken(kind, made, update=update)
    with pytest.raises(AssertionError, match="nodes are not those that a drafter proposes which took in the same text"):
        check_state(made.params, texts(name, (5, 9, 2)), algorithm=drafter, draft=tree, max_new_tokens=16)
