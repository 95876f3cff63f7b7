"""A drafter of one's own, as docs/drafters.md shows it, and the checks that hold for every drafter."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import ConfigError, SpecConfig, cli
from jaxspec.drafters import kinds
from jaxspec.drafters.base import Drafter
from jaxspec.testing import check_drafter, check_proposal, check_rows
from jaxspec.trees.tree import chain
from tests import tiny
from tests.drafters import eagle_cases

GUIDE = Path(__file__).parents[1] / "docs" / "drafters.md"
PROMPTS = [[3, 7, 3, 7, 3], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture
def known():
    """Kinds that a test registers are forgotten behind it."""
    before = dict(kinds.KINDS)
    yield kinds.KINDS
    kinds.KINDS.clear()
    kinds.KINDS.update(before)


@pytest.fixture
def guide(known, monkeypatch) -> dict:
    """What the guide's examples leave, run one after the other."""
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    scope = vars(module)
    scope |= {"params": tiny.target(), "prompts": PROMPTS}
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(examples) == 4
    for i, code in enumerate(examples):
        exec(compile(code, f"docs/drafters.md, example {i}", "exec", dont_inherit=True), scope)
    return scope


def test_the_guides_examples_run(guide, known):
    assert guide["accept_length"] > 1.2
    assert guide["result"][0].stats.algorithm == "BIGRAM" and guide["result"][0].stats.num_steps == 2
    plain = jaxspec.generate(tiny.target(), PROMPTS, algorithm="none")
    assert [a.tokens for a in guide["result"]] == [a.tokens for a in plain]
    check_drafter(tiny.target(), PROMPTS, algorithm="bigram", spec=SpecConfig(num_steps=3, options={"bigram_stay": True}))
    with pytest.raises(ConfigError, match="algorithm='bigram' takes num_steps alone: leave topk unset"):
        jaxspec.generate(tiny.target(), PROMPTS, algorithm="bigram", topk=2)
    with pytest.raises(ConfigError, match="algorithm='bigram' takes none of num_steps, .*: leave num_steps unset"):
        jaxspec.generate(tiny.target(), PROMPTS, algorithm=guide["drafter"], draft=guide["learnt"], num_steps=2)
    with pytest.raises(ConfigError, match="use_rejection_sampling needs a chain with draft probabilities"):
        spec = SpecConfig(use_rejection_sampling=True)
        jaxspec.generate(tiny.target(), PROMPTS, algorithm=guide["drafter"], draft=guide["learnt"], spec=spec)
    assert "bigram_stay" in cli.draft_options()


def test_registered_kinds_do_not_collide(known):
    def build(target, draft, spec):
        raise AssertionError("nobody asks for it")

    @dataclasses.dataclass(frozen=True)
    class Window(jaxspec.DraftOptions):
        draft_window_size: str = "wide"

    for kind, message in (
        (kinds.Kind("NGRAM", build), "name='NGRAM' must be in capitals and not one of AUTO, NONE, NGRAM"),
        (kinds.Kind("mine", build), "name='mine' must be in capitals"),
        (kinds.Kind("MINE", build, options=dict), "options=<class 'dict'> of MINE must be a subclass"),
        (kinds.Kind("MINE", build, options=Window), "the option draft_window_size of MINE means something else"),
        (kinds.Kind("MINE", build, tree=("depth",)), r"tree=\('depth',\) of MINE must be some of num_steps, topk"),
        (kinds.Kind("MINE", build, head="eagle3"), "head='eagle3' of MINE is that of EAGLE3"),
        (kinds.Kind("MINE", build, format=kinds.Format("uno", dict, build)), "stored='uno' of MINE is the format of UNO"),
    ):
        with pytest.raises(ConfigError, match=message):
            jaxspec.register(kind)
    assert "MINE" not in known


BUILT_IN = {
    "ngram": dict(algorithm="ngram", spec=SpecConfig(num_draft_tokens=5)),
    "standalone tree": dict(draft=tiny.small_draft, spec=SpecConfig(3, 3, 7)),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_drafters_without_features_pass_the_checks(name):
    given = dict(BUILT_IN[name])
    if callable(given.get("draft")):
        given["draft"] = given["draft"]()
    assert check_drafter(tiny.target(), PROMPTS, **given) >= 1.0


def test_an_eagle_head_passes_the_checks():
    target, head = eagle_cases.tiny_target(), eagle_cases.random_head("eagle3")
    assert check_drafter(target, eagle_cases.prompts(24), draft=head, spec=SpecConfig(3, 1, 4)) >= 1.0


@dataclasses.dataclass(frozen=True)
class Faulty(Drafter):
    """Announces too little, proposes another root, or has a state that does not keep the rules."""

    fault: str
    name = "FAULTY"

    @property
    def slack(self):
        return 1 if self.fault == "slack" else 3

    @property
    def max_accept(self):
        return 1 if self.fault == "accept" else 3

    def init(self, params, batch, *shapes):
        return jnp.zeros(1 if self.fault == "state" else batch)

    def update(self, params, state, ctx, accepted, features, n_accepted):
        return state + (1 if self.fault == "row" else n_accepted)

    def propose(self, params, state, ctx):
        root = ctx.bonus if self.fault != "root" else (ctx.bonus + 1) % 7
        return self.proposal(chain(jnp.stack([root, root, root], 1)), state, ctx)


@pytest.mark.parametrize(
    "fault, check, message",
    [
        ("slack", check_proposal, "slack=1 has no room for 3 nodes"),
        ("accept", check_proposal, "max_accept=1, but a round can emit 3 tokens"),
        ("root", check_proposal, "the root is ctx.bonus"),
        ("row", check_rows, "a leaf changed in a row that takes no part"),
        ("state", check_rows, r"a leaf of the state has shape \(1,\): 3 sequences stand in front"),
    ],
)
def test_the_checks_find_faults(fault, check, message):
    with pytest.raises(AssertionError, match=message):
        check(tiny.target(), PROMPTS, algorithm=Faulty(fault))
