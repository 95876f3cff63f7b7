"""Answers with block drafts equal plain decoding's: token by token when greedy, in distribution when sampled."""

import itertools
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import generate
from jaxspec.drafters.dflash import drafter as dflash
from tests.drafters.dflash_cases import VARIANTS, VOCAB, random_draft, target
from tests.drafters.distribution import fit
from tests.drafters.eagle_cases import prompts
from tests.specs import spec_of

TOKENS = 64
TREES = {"chain": {}, "tree": {"topk": 3, "num_draft_tokens": 9}}


@cache
def plain() -> list[list[int]]:
    answers = generate(target(), prompts(VOCAB), algorithm="none", max_new_tokens=TOKENS, ignore_eos=True)
    return [answer.tokens for answer in answers]


# Options that change what is drafted, but not the answers.
FURTHER = {
    ("dspark", "chain"): {"min_draft_survival": 0.3},
    ("causal head", "tree"): {"draft_window_size": 5, "draft_sink_size": 1},
    ("sliding", "chain"): {"num_steps": 3, "draft_window_size": 6},
}


def check(variant: str, tree: str, page_size: int, batch: int, chunk: int | None, **spec) -> float:
    draft = random_draft(variant)
    answers = generate(
        target(),
        prompts(VOCAB)[:batch],
        draft=draft,
        spec=spec_of(**TREES[tree], **spec),
        max_new_tokens=TOKENS,
        ignore_eos=True,
        page_size=page_size,
        prefill_chunk=chunk,
    )
    for answer, expected in zip(answers, plain(), strict=False):
        assert answer.tokens == expected
        assert answer.stats.algorithm == draft.config.algorithm
        if "min_draft_survival" in spec:
            assert answer.stats.proposed < answer.stats.rounds * draft.config.num_drafts
    return sum(answer.stats.accept_length for answer in answers) / batch


# Every pair of values of tree, page size, batch and chunk occurs, and every family.
PAIRS = [
    ("dflash", "tree", 1, 4, 4),
    ("sliding", "chain", 1, 4, None),
    ("symmetric", "tree", 16, 1, 4),
    ("dflash2", "chain", 16, 4, 4),
    ("causal head", "tree", 1, 1, None),
    ("deepspec", "chain", 16, 1, None),
    ("speculators", "tree", 16, 4, None),
    ("dspark", "chain", 1, 1, 4),
    ("dspark gated", "tree", 16, 4, 4),
    ("dspark rnn", "tree", 1, 1, None),
]


@pytest.mark.parametrize("variant, tree, page_size, batch, chunk", PAIRS)
def test_greedy_answers_equal_plain_decoding(variant, tree, page_size, batch, chunk):
    assert check(variant, tree, page_size, batch, chunk, **FURTHER.get((variant, tree), {})) > 1.02


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_answers_equal_plain_decoding_in_every_combination(variant):
    for tree, page_size, batch in itertools.product(TREES, (1, 16), (1, 4)):
        check(variant, tree, page_size, batch, 4 if batch == 4 else None)
    for (name, tree), options in FURTHER.items():
        if name == variant:
            check(variant, tree, 4, 4, None, **options)


def p_of(variant: str, **spec) -> float:
    p, batch = fit(target(), 2000, 3.0, draft=random_draft(variant), spec=spec_of(**spec))
    if "min_draft_survival" in spec:
        share = np.mean(batch.state.proposed / batch.state.rounds) / spec["num_steps"]
        assert 0.2 < share < 0.9
    return p


# In every mode of verification: target-only over trees and chains, rejection, block; drawn by every head; ends by estimate.
SAMPLED = {
    "greedy tree": ("dflash2", TREES["tree"]),
    "rejection, reduced vocabulary": ("speculators", {"num_steps": 2, "use_rejection_sampling": True}),
    "block, cut by confidence": ("dspark", {"num_steps": 3, "use_block_verification": True, "min_draft_survival": 0.3}),
}
SAMPLED_SLOW = {
    "greedy chain": ("dflash", {"num_steps": 2}),
    "rejection by default, selector": ("dflash2", {"num_steps": 2}),
    "rejection by default, cut by confidence": ("dspark", {"num_steps": 3, "min_draft_survival": 0.3}),
    "block, recurrent": ("dspark rnn", {"num_steps": 3, "use_block_verification": True}),
    "tree grown by a gated head": ("dspark gated", TREES["tree"]),
}
LEVEL = 1e-3 / (len(SAMPLED) + len(SAMPLED_SLOW))


@pytest.mark.parametrize("mode", [*SAMPLED, *(pytest.param(mode, marks=pytest.mark.slow) for mode in SAMPLED_SLOW)])
def test_sampled_answers_have_the_targets_distribution(mode):
    variant, spec = (SAMPLED | SAMPLED_SLOW)[mode]
    assert p_of(variant, **spec) > LEVEL


@pytest.mark.slow
def test_a_wrong_draft_distribution_is_found(monkeypatch):
    """Otherwise the tests above would show nothing."""
    right = dflash.draw

    def flat(logits, keys, sampling):
        q, index = right(logits, keys, sampling)
        return jnp.full_like(q, 1 / q.shape[-1]), index

    monkeypatch.setattr(dflash, "draw", flat)
    assert p_of("dspark", num_steps=2) < LEVEL
