"""The tree may change between launches: state and pages are those of the largest one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec import ConfigError, generate, testing
from jaxspec.drafters.base import Drafter
from tests.engine.cases import case_of, texts

CASES = {
    "standalone tree": ({"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, {"num_steps": 1, "topk": 2, "num_draft_tokens": 3}),
    "eagle3 tree": ({"num_steps": 2, "topk": 1, "num_draft_tokens": 3}, {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}),
    "peagle": ({"num_steps": 2, "num_draft_tokens": 3}, {"num_steps": 4, "num_draft_tokens": 5}),
    "mtp one layer": ({"num_steps": 1, "topk": 1, "num_draft_tokens": 2},),
    "mtp layer per step": ({"num_steps": 1, "num_draft_tokens": 2}, {"num_steps": 2, "num_draft_tokens": 3}),
    "dflash tree": ({"num_steps": 2, "topk": 2, "num_draft_tokens": 4},),
    "ngram": ({"num_draft_tokens": 3},),
    "uno tree": ({"num_draft_tokens": 3},),
}


def nodes(batch, program) -> list[np.ndarray]:
    """What would be drafted next: tokens, parents and which nodes there are."""
    tree = testing._propose(program, batch.tree, batch.draft_tree, batch.state).tree
    return [np.where(tree.valid, x, -2) for x in (tree.tokens, tree.parent)]


QUICK = ("standalone tree", "peagle", "mtp layer per step")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_trees_take_turns_on_one_state(name):
    """Answers stay the target's, and after every switch the drafts are those of a run that began with that tree."""
    case = case_of(name)
    prompts = texts(name, (9, 5), seed=3)
    plain = generate(case.params, prompts, algorithm="none", max_new_tokens=30, ignore_eos=True)
    batch = testing.start(case.params, prompts, case.algorithm, case.draft, case.spec, 30)
    largest = batch.program
    programs = [largest] + [dataclasses.replace(largest, drafter=largest.drafter.with_tree(**tree)) for tree in CASES[name]]
    for turn in range(3):
        batch.program = programs[turn % len(programs)]
        batch.run(2)
        emitted = [log.tokens for log in batch.logs()]
        # A text that was taken in at once: its state never saw another tree.
        fresh = testing.start(
            case.params, [p + t[:-1] for p, t in zip(prompts, emitted, strict=True)], case.algorithm, case.draft, case.spec, 4
        )
        assert [log.tokens[0] for log in fresh.logs()] == [t[-1] for t in emitted]
        if name not in ("uno tree",):  # whose noise depends on the round
            for program in programs:
                for was, now in zip(nodes(batch, program), nodes(fresh, program), strict=True):
                    np.testing.assert_array_equal(was, now)
    batch.program = largest
    batch.run()
    assert [log.tokens for log in batch.logs()] == [answer.tokens for answer in plain]


def test_a_tree_must_fit_into_the_largest():
    drafter = testing.start(
        *(lambda c: (c.params, [[1, 2]], c.algorithm, c.draft, c.spec, 4))(case_of("eagle3 tree"))
    ).program.drafter
    with pytest.raises(ConfigError, match="num_steps=9 must be at least 1 and at most 3"):
        drafter.with_tree(num_steps=9)
    with pytest.raises(ConfigError, match="NONE has no num_steps"):
        Drafter().with_tree(num_steps=1)
