"""Greedy answers with any EAGLE head equal plain decoding's, token by token."""

import itertools
from functools import cache

import pytest

from jaxspec import SpecConfig, generate
from tests.drafters.eagle_cases import VARIANTS, prompts, random_head, tiny_target, trained

TOKENS = 64
TREES = {"chain": (3, 1, 4), "tree": (3, 3, 7)}


@cache
def plain(trained_target: bool) -> list[list[int]]:
    target = trained("e2e_eagle3")[0] if trained_target else tiny_target()
    answers = generate(target, prompts(target.config.vocab_size), algorithm="none", max_new_tokens=TOKENS, ignore_eos=True)
    return [answer.tokens for answer in answers]


def check(variant: str, tree: str, page_size: int, batch: int, chunk: int | None, **spec) -> float:
    learned = variant.startswith("e2e")
    target, head = trained(variant) if learned else (tiny_target(), random_head(variant))
    steps, topk, nodes = TREES[tree]
    spec = SpecConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes, **spec)
    answers = generate(
        target, prompts(target.config.vocab_size)[:batch], draft=head, spec=spec, max_new_tokens=TOKENS, ignore_eos=True,
        page_size=page_size, prefill_chunk=chunk,
    )  # fmt: skip
    for answer, expected in zip(answers, plain(learned), strict=False):
        assert answer.tokens == expected
        assert answer.stats.algorithm == head.config.algorithm
    return sum(answer.stats.accept_length for answer in answers) / batch


# Every pair of values of tree, page size, batch and chunk occurs, and every variant.
PAIRS = [
    ("e2e_eagle3", "tree", 1, 4, 4),
    ("eagle", "chain", 1, 4, None),
    ("eagle3", "tree", 16, 1, 4),
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
