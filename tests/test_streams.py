"""Streams: what comes in pieces, checked at the call, and side by side with other calls."""

from __future__ import annotations

from itertools import zip_longest

import pytest

import jaxspec
from jaxspec import ConfigError
from tests import tiny

LENGTH = 30
OPTIONS = {"max_new_tokens": LENGTH}
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}


@pytest.fixture(scope="module")
def reference():
    prompts = tiny.prompts(3, seed=4)
    return prompts, jaxspec.generate(tiny.target(), prompts, algorithm="none", **OPTIONS)


def told(chunks) -> tuple[list[int], str]:
    return [t for c in chunks for t in c.tokens], "".join(c.text for c in chunks)


@pytest.mark.parametrize("rounds", [1, 4])
def test_chunks_say_which_tokens_were_drafted(rounds, reference):
    prompts, expected = reference
    chunks = list(jaxspec.stream(tiny.target(), prompts, draft=tiny.target(), rounds_per_chunk=rounds, **TREE, **OPTIONS))
    for i, answer in enumerate(expected):
        own = [c for c in chunks if c.index == i]
        assert told(own) == (answer.tokens, answer.text)
        assert all(len(c.from_draft) == len(c.tokens) for c in own)
        assert [c.result is not None for c in own] == [False] * (len(own) - 1) + [True]
        result, drafted = own[-1].result, [flag for c in own for flag in c.from_draft]
        assert drafted == result.from_draft
        assert not drafted[0] and any(drafted) and sum(drafted) == result.stats.accepted
        # The first token comes alone, then what each `rounds` rounds gave.
        assert [len(c.tokens) for c in own][0] == 1
        assert len(own) == 1 + -(-result.stats.rounds // rounds)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature=-1"),
        ({"rounds_per_chunk": 0}, "rounds_per_chunk=0"),
        ({"algorithm": "eagle9"}, "eagle9"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"prefill_attention": "flash"}, "prefill_attention='flash'"),
    ],
)
def test_arguments_are_checked_at_the_call(options, message):
    with pytest.raises(ConfigError, match=message):
        jaxspec.stream(tiny.target(), "A", **options)
    with pytest.raises(TypeError, match="max_tokens"):
        jaxspec.stream(tiny.target(), "A", max_tokens=3)


def test_streams_by_turns_and_calls_inside_a_stream(reference):
    prompts, expected = reference
    streams = [
        jaxspec.stream(tiny.target(), prompts[0], draft=tiny.small_draft(), **TREE, **OPTIONS),
        jaxspec.stream(tiny.target(), prompts[1], draft=tiny.small_draft(), **TREE, **OPTIONS),
    ]
    heard: list[list] = [[], []]
    for turn, pair in enumerate(zip_longest(*streams)):
        for chunks, chunk in zip(heard, pair, strict=True):
            chunks += [chunk] if chunk is not None else []
        if turn in (0, 3):
            inside = jaxspec.generate(tiny.target(), prompts[2], draft=tiny.small_draft(), **TREE, **OPTIONS)
            assert inside.tokens == expected[2].tokens
    for chunks, answer in zip(heard, expected, strict=False):
        assert told(chunks) == (answer.tokens, answer.text)
        assert chunks[-1].result.tokens == answer.tokens


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_a_stream_left_half_way_disturbs_nothing(chunks, reference):
    prompts, expected = reference
    options = {"draft": tiny.small_draft(), **TREE, **OPTIONS}
    left = jaxspec.stream(tiny.target(), prompts, **options)
    for _ in range(chunks):
        next(left)
    left.close()
    kept = jaxspec.stream(tiny.target(), prompts[1], **options)
    next(kept)  # neither closed nor read to its end
    results = jaxspec.generate(tiny.target(), prompts, **options)
    assert [r.tokens for r in results] == [r.tokens for r in expected]


def test_an_error_inside_a_stream_disturbs_nothing(reference):
    prompts, expected = reference
    options = {"draft": tiny.small_draft(), **TREE, **OPTIONS}
    with pytest.raises(RuntimeError, match="the reader's own"):
        for _ in jaxspec.stream(tiny.target(), prompts, **options):
            raise RuntimeError("the reader's own")
    assert [r.tokens for r in jaxspec.generate(tiny.target(), prompts, **options)] == [r.tokens for r in expected]
