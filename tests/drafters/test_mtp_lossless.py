"""Answers with MTP layers equal plain decoding's: token by token when greedy, in distribution when sampled."""

import itertools
from functools import cache

import pytest

from jaxspec import MtpOptions, SpecConfig, generate
from jaxspec.drafters.mtp.config import mtp_config
from tests.drafters.distribution import fit
from tests.drafters.mtp_cases import TARGETS, dense_target, prompts, target, with_mtp

TOKENS = 64
TREES = {"chain": (3, 1, 4), "tree": (3, 3, 7)}


def plain(name: str) -> list[list[int]]:
    return plain_answers(name if name in ("mtp_mimo", "mtp_deepseek_v3", "gated") else "raw")  # the others share a target


@cache
def plain_answers(name: str) -> list[list[int]]:
    params = target(name)
    answers = generate(params, prompts(params.config.vocab_size), algorithm="none", max_new_tokens=TOKENS, ignore_eos=True)
    return [answer.tokens for answer in answers]


def check(name: str, tree: str, page_size: int, batch: int, chunk: int | None) -> None:
    params = target(name)
    spec = SpecConfig(*TREES[tree], options=MtpOptions(5, 1) if name == "raw" else None)
    answers = generate(
        params,
        prompts(params.config.vocab_size)[:batch],
        spec=spec,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        page_size=page_size,
        prefill_chunk=chunk,
    )
    for answer, expected in zip(answers, plain(name), strict=False):
        assert answer.tokens == expected
        assert answer.stats.algorithm == "NEXTN"


# Every pair of values of tree, page size, batch and chunk occurs, and every target.
PAIRS = [
    ("mtp_mimo", "tree", 1, 4, 4),
    ("mtp_deepseek_v3", "chain", 16, 4, 4),
    ("gated", "tree", 16, 1, None),
    ("raw", "chain", 1, 1, 4),
    ("three layers", "chain", 1, 4, 4),
    ("two layers", "chain", 16, 1, 4),
    ("three layers", "tree", 16, 4, 4),
    ("three layers, no chain", "chain", 16, 4, None),
]


@pytest.mark.parametrize("name, tree, page_size, batch, chunk", PAIRS)
def test_greedy_answers_equal_plain_decoding(name, tree, page_size, batch, chunk):
    check(name, tree, page_size, batch, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_answers_equal_plain_decoding_in_every_combination(name):
    for tree, page_size, batch, chunk in itertools.product(TREES, (1, 16), (1, 4), (4, None)):
        check(name, tree, page_size, batch, chunk)


@cache
def tiny_vocabulary():
    small = dense_target(vocab=6)
    return with_mtp(small, mtp_config(small.config, "mimo", 1))


@pytest.mark.parametrize("tree", ["tree", "rejection"])
def test_sampled_answers_have_the_targets_distribution(tree):
    spec = SpecConfig(2, 2, 5) if tree == "tree" else SpecConfig(2, 1, 3, use_rejection_sampling=True)
    p, _ = fit(tiny_vocabulary(), 2000, 2.0, spec=spec)
    assert p > 1e-3
