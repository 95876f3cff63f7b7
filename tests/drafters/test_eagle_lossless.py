"""Greedy answers with any EAGLE head equal plain decoding's, token by token."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jaxspec import SpecConfig, generate
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.loading import DraftParams
from tests.drafters.distribution import fit
from tests.drafters.eagle_cases import VARIANTS, head_config, prompts, random_head, tiny_target, trained
from tests.specs import spec_of

TOKENS = 64
TREES = {
    "chain": dict(num_steps=3, topk=1, num_draft_tokens=4),
    "tree": dict(num_steps=3, topk=3, num_draft_tokens=7),
    "window": dict(num_steps=3, topk=3, num_draft_tokens=7, draft_window_size=4, draft_sink_size=1),
    "static": dict(static_tree="0 1 2 00 01 10 000"),
}


@cache
def plain(trained_target: bool) -> list[list[int]]:
    target = trained("e2e_eagle3")[0] if trained_target else tiny_target()
    answers = generate(target, prompts(target.config.vocab_size), algorithm="none", max_new_tokens=TOKENS, ignore_eos=True)
    return [answer.tokens for answer in answers]


def check(variant: str, tree: str, page_size: int, batch: int, chunk: int | None) -> float:
    learned = variant.startswith("e2e")
    target, head = trained(variant) if learned else (tiny_target(), random_head(variant))
    answers = generate(
        target,
        prompts(target.config.vocab_size)[:batch],
        draft=head,
        spec=spec_of(**TREES[tree]),
        max_new_tokens=TOKENS,
        ignore_eos=True,
        page_size=page_size,
        prefill_chunk=chunk,
    )
    for answer, expected in zip(answers, plain(learned), strict=False):
        assert answer.tokens == expected
        assert answer.stats.algorithm == head.config.algorithm
    return sum(answer.stats.accept_length for answer in answers) / batch


# Every pair of values of branching or not, page size, batch and chunk occurs, and every variant.
PAIRS = [
    ("e2e_eagle3", "tree", 1, 4, 4),
    ("eagle", "static", 1, 4, None),
    ("eagle3", "window", 16, 1, 4),
    ("eagle31", "chain", 16, 4, 4),
    ("speculators", "tree", 1, 1, None),
    ("deepspec", "chain", 16, 1, None),
    ("wide", "tree", 16, 4, None),
    ("borrowed head", "chain", 1, 1, 4),
    ("peagle", "chain", 16, 4, 4),
]


@pytest.mark.parametrize("variant, tree, page_size, batch, chunk", PAIRS)
def test_greedy_answers_equal_plain_decoding(variant, tree, page_size, batch, chunk):
    accept_length = check(variant, tree, page_size, batch, chunk)
    if variant.startswith("e2e"):
        assert accept_length > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["e2e_eagle2", "e2e_eagle3", *VARIANTS])
def test_greedy_answers_equal_plain_decoding_in_every_combination(variant):
    trees = ["chain"] if variant == "peagle" else list(TREES)
    for tree, page_size, batch, chunk in itertools.product(trees, (1, 16), (1, 4), (4, None)):
        check(variant, tree, page_size, batch, chunk)


SAMPLED = {
    "tree": ("eagle3", SpecConfig(2, 3, 6)),
    "rejection": ("eagle3", SpecConfig(2, 1, 3, use_rejection_sampling=True)),
    "block": ("eagle", SpecConfig(2, 1, 3, use_block_verification=True)),
    "parallel rejection": ("peagle", SpecConfig(2, 1, 3, use_rejection_sampling=True)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_answers_have_the_targets_distribution(name):
    """2000 answers of three tokens against the exact distribution; the reduced draft vocabulary lacks two of six tokens."""
    variant, spec = SAMPLED[name]
    target = tiny_target(6)
    settings = VARIANTS[variant] | (dict(draft_vocab_size=4) if variant == "eagle3" else {})
    config = head_config(target.config, **settings)
    params = eagle_model.init_params(config, jax.random.key(2))
    if config.reduced_vocab:
        params["target_ids"] = jnp.array([0, 2, 3, 5], jnp.int32)
    p, _ = fit(target, 2000, 3.0, draft=DraftParams(params, config), spec=spec)
    assert p > 1e-3
