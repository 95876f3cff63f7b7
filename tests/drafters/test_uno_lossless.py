"""Answers with UNO equal plain decoding's: token by token when greedy, in distribution when sampled."""

import itertools
from functools import cache

import jax.numpy as jnp
import pytest

from jaxspec import SpecConfig, UnoOptions, generate
from jaxspec.drafters.uno import drafter as uno
from tests.drafters.distribution import fit
from tests.drafters.eagle_cases import prompts
from tests.drafters.uno_cases import random_adapter, recorded, target

TOKENS = 64
TREES = {
    "chain": dict(num_draft_tokens=4),
    "tree": dict(num_steps=3, topk=3, num_draft_tokens=9),
    "narrow tree": dict(num_steps=4, topk=2, num_draft_tokens=4),  # fewer nodes than rows: SGLang refuses it
}
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)


@cache
def plain(case: str, penalized: bool) -> list[list[int]]:
    model = recorded()[0] if case == "recorded" else target()
    options = PENALTIES if penalized else {}
    asked = prompts(model.config.vocab_size)
    answers = generate(model, asked, algorithm="none", max_new_tokens=TOKENS, ignore_eos=True, **options)
    return [answer.tokens for answer in answers]


def check(case: str, tree: str, page_size: int, batch: int, chunk: int | None, penalized: bool, noise: str = "uniform"):
    model, adapter = recorded() if case == "recorded" else (target(), random_adapter())
    answers = generate(
        model,
        prompts(model.config.vocab_size)[:batch],
        draft=adapter,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        seed=1,
        spec=SpecConfig(**TREES[tree], options=UnoOptions(noise, model.config.vocab_size - 1)),
        page_size=page_size,
        prefill_chunk=chunk,
        **PENALTIES if penalized else {},
    )
    for answer, expected in zip(answers, plain(case, penalized), strict=False):
        assert answer.tokens == expected
        stats = answer.stats
        assert stats.algorithm == "UNO"
        assert stats.tokens_per_pass == stats.accept_length / 2
        assert stats.rounds + stats.accepted + stats.rounds >= TOKENS - 1 > 2 * (stats.rounds - 1) + stats.accepted
        assert len(stats.accepted_histogram) <= 4
    return sum(answer.stats.accept_length for answer in answers) / batch


# Every value occurs with every other one of tree, page size, batch, chunk and penalties.
PAIRS = [
    ("recorded", "chain", 1, 4, 4, True, "uniform"),
    ("recorded", "tree", 16, 1, None, False, "hash"),
    ("random", "chain", 16, 1, None, False, "mask"),
    ("random", "tree", 1, 4, 4, True, "uniform"),
    ("random", "narrow tree", 16, 4, 4, False, "hash"),
    ("random", "narrow tree", 1, 1, None, True, "uniform"),
]


@pytest.mark.parametrize("case, tree, page_size, batch, chunk, penalized, noise", PAIRS)
def test_greedy_answers_equal_plain_decoding(case, tree, page_size, batch, chunk, penalized, noise):
    assert check(case, tree, page_size, batch, chunk, penalized, noise) > 2.02


@pytest.mark.slow
@pytest.mark.parametrize("case", ["recorded", "random"])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_answers_equal_plain_decoding_in_every_combination(case, tree):
    for page_size, batch, chunk, penalized in itertools.product((1, 16), (1, 4), (4, None), (False, True)):
        check(case, tree, page_size, batch, chunk, penalized)


def p_of(spec: dict, top_k: int | None = None) -> float:
    return fit(target(), 1500, 3.0, top_k, draft=random_adapter(), spec=SpecConfig(**spec))[0]


# The prefill's token, the exact token and a draft or correction behind it, in every mode of verification.
SAMPLED = {
    "greedy chain": ({"num_draft_tokens": 2}, None),
    "tree": ({"num_steps": 2, "topk": 3, "num_draft_tokens": 6}, None),
    "rejection": ({"num_draft_tokens": 2, "use_rejection_sampling": True}, None),
    "rejection, top_k": ({"num_draft_tokens": 3, "use_rejection_sampling": True}, 4),
    "block": ({"num_draft_tokens": 3, "use_block_verification": True}, None),
}
LEVEL = 1e-3 / len(SAMPLED)


@pytest.mark.parametrize("mode", SAMPLED)
def test_sampled_answers_have_the_targets_distribution(mode):
    assert p_of(*SAMPLED[mode]) > LEVEL


def test_a_wrongly_drawn_exact_token_is_found(monkeypatch):
    """Otherwise the tests above would show nothing."""
    monkeypatch.setattr(uno, "choose", lambda ctx, logits: jnp.argmax(logits[:, 0], -1).astype(jnp.int32))
    assert p_of({"num_draft_tokens": 4}) < LEVEL  # a chain that no test above has compiled
