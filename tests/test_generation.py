"""Losslessness and the surface of `generate` and `stream`."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import numpy as np
import pytest

import jaxspec
from jaxspec import runtime
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.engine import kept, sizes
from jaxspec.engine.device import Device
from pallas_kernels.attention import rows
from tests import tiny

LENGTH = 40


def plain(prompts, **options):
    return jaxspec.generate(tiny.target(), prompts, algorithm="none", **{"max_new_tokens": LENGTH, **options})


@pytest.fixture(scope="module")
def reference():
    prompts = tiny.prompts(4)
    return prompts, [r.tokens for r in plain(prompts)]


CASES = {
    "ngram": {"algorithm": "ngram"},
    "ngram, 5 nodes": {"algorithm": "NGRAM", "num_draft_tokens": 5, "page_size": 1},
    "chain": {"draft": "small", "page_size": 1, "prefill_chunk": 5},
    "tree": {"draft": "small", "num_steps": 3, "topk": 3, "num_draft_tokens": 9, "prefill_chunk": 7},
    "tree on single pages": {"draft": "small", "num_steps": 2, "topk": 4, "num_draft_tokens": 12, "page_size": 1},
}


ALONE = ("ngram, 5 nodes", "tree")
"""Cases that are tried with one prompt, too."""


def options_of(case: dict) -> dict:
    return {**case, "draft": tiny.small_draft()} if case.get("draft") == "small" else dict(case)


@pytest.mark.parametrize("name", CASES)
def test_greedy_output_equals_plain_decoding(name, reference):
    prompts, expected = reference
    options = options_of(CASES[name])
    batch = jaxspec.generate(tiny.target(), prompts, max_new_tokens=LENGTH, **options)
    assert [r.tokens for r in batch] == expected
    if name in ALONE:
        alone = jaxspec.generate(tiny.target(), prompts[1], max_new_tokens=LENGTH, **options)
        assert alone.tokens == expected[1]


@pytest.mark.parametrize(
    ("case", "chunk"), [({}, 5), ({"algorithm": "ngram"}, None), ({"draft": "small"}, None), ({"draft": "small"}, 5)]
)
def test_a_first_chunk_attended_to_by_a_library_changes_no_answer(case, chunk, reference, monkeypatch):
    """Prompts that are long beside the sizes of the programs."""
    prompts, expected = reference
    monkeypatch.setattr(sizes, "SIZES", {"cpu": (1, 2)})
    monkeypatch.setattr(sizes, "BLOCK", {"cpu": 4})
    monkeypatch.setattr(sizes, "LONG_SIZES", {"cpu": (8,), "gpu": (8,)})
    long, run = [], Device._prefill
    monkeypatch.setattr(Device, "_prefill", lambda self, each, of: long.append(each.long) or run(self, each, of))
    options = {"algorithm": "none", **options_of(case)} if not case else options_of(case)
    results = jaxspec.generate(
        tiny.target(), prompts, prefill_attention="xla", prefill_chunk=chunk, max_new_tokens=LENGTH, **options
    )
    assert [r.tokens for r in results] == expected
    assert any(long) and not all(long)


def test_prefill_attention_is_chosen_by_model_and_device(monkeypatch):
    config = tiny.target().config
    choose = partial(sizes.prefill_attention, config, np.dtype("float32"))
    assert [choose(), choose("paged"), choose("xla")] == [None, None, "xla"]
    with pytest.raises(ConfigError, match="prefill_attention='cudnn' needs a GPU"):
        choose("cudnn")
    with pytest.raises(ConfigError, match="prefill_attention='flash' must be one of auto, paged, cudnn, xla"):
        jaxspec.generate(tiny.target(), [1, 2], prefill_attention="flash")
    asked = []
    monkeypatch.setattr(rows, "attends_over_rows", lambda *kind: asked.append(kind) or True)
    assert [choose("paged"), choose(), choose("cudnn")] == [None, "cudnn", "cudnn"] and len(asked) == 2


@pytest.mark.parametrize("tree", [(3, 1, 4), (2, 3, 13)])
def test_target_as_its_own_draft_is_always_accepted(tree, reference):
    """A tree that keeps every candidate (13 = 1 + 3 + 9) must hold the greedy path."""
    prompts, expected = reference
    steps, topk, nodes = tree
    results = jaxspec.generate(
        tiny.target(), prompts, draft=tiny.target(), num_steps=steps, topk=topk, num_draft_tokens=nodes, max_new_tokens=LENGTH
    )
    for result, tokens in zip(results, expected, strict=True):
        assert result.tokens == tokens
        full = (LENGTH - 1) // (steps + 1)
        assert result.stats.accepted_histogram[steps] >= full
        assert result.stats.rounds == -(-(LENGTH - 1) // (steps + 1))


def test_history_of_earlier_outputs_drafts_them_again(reference):
    prompts, expected = reference
    history = NgramHistory()
    first = jaxspec.generate(tiny.target(), prompts[0], draft=history, max_new_tokens=LENGTH)
    again = jaxspec.generate(tiny.target(), prompts[0], draft=history, max_new_tokens=LENGTH)
    assert first.tokens == again.tokens == expected[0]
    assert again.stats.accept_length > max(3.0, first.stats.accept_length)


def test_statistics_are_consistent(reference):
    prompts, _ = reference
    for result in jaxspec.generate(tiny.target(), prompts, max_new_tokens=LENGTH, **options_of(CASES["tree"])):
        stats = result.stats
        assert stats.completion_tokens == len(result.tokens) == len(result.from_draft) == len(result.pieces)
        assert sum(stats.accepted_histogram) == stats.rounds
        assert sum(i * n for i, n in enumerate(stats.accepted_histogram)) == stats.accepted == sum(result.from_draft)
        assert stats.proposed == stats.rounds * 8
        assert stats.completion_tokens <= stats.accepted + stats.rounds + 1
        assert stats.accept_length == pytest.approx((stats.completion_tokens - 1) / stats.rounds)
        assert "accept length" in str(stats)
        assert result.finish_reason == "length"


def test_one_prompt_or_a_batch():
    target = tiny.target()
    one = jaxspec.generate(target, "HELLO", max_new_tokens=4)
    assert isinstance(one, jaxspec.GenerationResult)
    assert one.text == target.tokenizer.decode(one.tokens)
    ids = target.tokenizer.encode("HELLO")
    assert jaxspec.generate(target, ids, max_new_tokens=4).tokens == one.tokens
    assert jaxspec.generate(target, np.array(ids), max_new_tokens=4).tokens == one.tokens
    for batch in (["HELLO"], [ids], ["HELLO", ids]):
        results = jaxspec.generate(target, batch, max_new_tokens=4)
        assert isinstance(results, list)
        assert all(r.tokens == one.tokens for r in results)


def test_stream_gives_the_same_in_pieces(reference):
    prompts, expected = reference
    tokens, texts, results = [[] for _ in prompts], ["" for _ in prompts], {}
    for chunk in jaxspec.stream(tiny.target(), prompts, max_new_tokens=LENGTH, **options_of(CASES["tree"])):
        tokens[chunk.index] += chunk.tokens
        texts[chunk.index] += chunk.text
        if chunk.result is not None:
            results[chunk.index] = chunk.result
    assert tokens == expected
    assert [results[i].tokens for i in range(4)] == expected
    assert [results[i].text for i in range(4)] == texts
    with pytest.raises(TypeError, match="max_tokens"):
        next(jaxspec.stream(tiny.target(), "A", max_tokens=3))


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 5, 6, 7, 17])
def test_a_stop_string_ends_text_tokens_and_statistics_at_one_point(width, at, reference):
    prompts, expected = reference
    tokenizer = tiny.target().tokenizer
    full = tokenizer.decode(expected[2])
    stop = full[at : at + width]
    begin = full.index(stop)
    options = {"draft": tiny.target(), "stop": [stop, "\x7f never"], "max_new_tokens": LENGTH}
    for result in (
        jaxspec.generate(tiny.target(), prompts[2], **options),
        [c.result for c in jaxspec.stream(tiny.target(), prompts[2], **options)][-1],
    ):
        assert result.text == full[:begin]
        assert result.tokens == expected[2][: begin + width]
        assert result.finish_reason == "stop"
        assert len(result.from_draft) == len(result.tokens) == result.stats.completion_tokens
        assert sum(result.stats.accepted_histogram) == result.stats.rounds == -(-(begin + width - 1) // 4)


def test_streamed_text_never_shows_a_part_of_a_stop_string(reference):
    prompts, expected = reference
    full = tiny.target().tokenizer.decode(expected[2])
    stop = full[9:13]
    shown = "".join(
        c.text for c in jaxspec.stream(tiny.target(), prompts[2], algorithm="none", stop=stop, max_new_tokens=LENGTH)
    )
    assert shown == full[: full.index(stop)]


def test_same_seed_same_answer_whatever_the_batch():
    prompts = tiny.prompts(4)[1:3]
    options = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 24, "draft": tiny.small_draft()}
    batch = jaxspec.generate(tiny.target(), prompts, seed=7, **options)
    assert jaxspec.generate(tiny.target(), prompts[1], seed=7, **options).tokens == batch[1].tokens
    assert jaxspec.generate(tiny.target(), prompts[1], seed=8, **options).tokens != batch[1].tokens
    mixed = jaxspec.generate(tiny.target(), [prompts[1], prompts[0]], seed=[7, 9], **options)
    assert mixed[0].tokens == batch[1].tokens


def test_penalised_greedy_output_equals_plain_decoding():
    prompts = tiny.prompts(3, seed=5)
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    expected = [r.tokens for r in plain(prompts, **options)]
    assert expected != [r.tokens for r in plain(prompts)]
    results = jaxspec.generate(
        tiny.target(), prompts, draft=tiny.target(), num_steps=3, topk=2, num_draft_tokens=7, max_new_tokens=LENGTH, **options
    )
    assert [r.tokens for r in results] == expected


def test_output_stops_where_the_context_ends():
    short = tiny.target(max_positions=32)
    result = jaxspec.generate(short, [1] * 25, draft=short, max_new_tokens=100)
    assert len(result.tokens) == 7
    assert result.finish_reason == "length"


def test_stop_ids_of_the_model_and_of_the_request(reference):
    prompts, expected = reference
    stop = expected[0][10]
    cut = expected[0][: expected[0].index(stop) + 1]
    result = jaxspec.generate(tiny.target(), prompts[0], draft=tiny.target(), stop_token_ids=[stop], max_new_tokens=LENGTH)
    assert (result.tokens, result.finish_reason) == (cut, "stop")
    assert result.text == tiny.target().tokenizer.decode(cut[:-1])
    own = dataclasses.replace(tiny.target().config, stop_token_ids=(stop,))
    model = jaxspec.ModelParams(tiny.target().tree, own, tiny.target().tokenizer)
    assert jaxspec.generate(model, prompts[0], algorithm="none", max_new_tokens=LENGTH).tokens == cut
    assert jaxspec.generate(model, prompts[0], ignore_eos=True, max_new_tokens=LENGTH).tokens == expected[0]


BAD = {
    "unknown algorithm": ({"algorithm": "eagle9"}, "eagle9.*ngram"),
    "missing draft": ({"algorithm": "standalone"}, "needs draft"),
    "draft for another algorithm": ({"algorithm": "ngram", "draft": "small"}, "STANDALONE"),
    "not a draft": ({"draft": 3}, "int is not a draft"),
    "only some tree parameters": ({"draft": "small", "num_steps": 3}, "topk, num_draft_tokens missing"),
    "tree too large": ({"draft": "small", "num_steps": 2, "topk": 2, "num_draft_tokens": 9}, "num_draft_tokens=9.*2 to 7"),
    "negative steps": ({"draft": "small", "num_steps": -1, "topk": 1, "num_draft_tokens": 2}, "num_steps=-1"),
    "ngram with steps": ({"algorithm": "ngram", "num_steps": 3}, "num_draft_tokens alone"),
    "ngram of one node": ({"algorithm": "ngram", "num_draft_tokens": 1}, "num_draft_tokens=1"),
    "temperature": ({"temperature": -1.0}, "temperature=-1"),
    "top_p": ({"top_p": 0.0}, "top_p=0"),
    "top_k": ({"top_k": 0}, "top_k=0"),
    "max_new_tokens": ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    "page_size": ({"page_size": 0}, "page_size=0"),
    "threshold": ({"spec": lambda: SpecConfig(accept_threshold_single=1.5)}, "accept_threshold_single=1.5"),
    "chat": ({"chat": True}, "no chat template"),
    "chat value": ({"chat": "yes"}, "chat='yes'"),
    "stop": ({"stop": [""]}, "stop="),
    "seeds": ({"seed": [1, 2]}, "2 seeds.*1 prompts"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_parameter(name):
    options, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        options = {k: v() if callable(v) else v for k, v in options_of(options).items()}
        jaxspec.generate(tiny.target(), "HELLO", **{"max_new_tokens": 4, **options})


BAD_PROMPTS = {
    "empty string": ("", "empty"),
    "empty list": ([], "empty"),
    "too long": ([1] * 256, "256 tokens.*context holds 256"),
    "id outside": ([1, tiny.VOCAB], "61.*ids 0 to 60"),
    "number": (3, "prompt"),
    "mixed": (["A", 3.5], "prompt 1 is a float"),
    "chat without template": ([{"role": "user", "content": "HI"}], "chat template"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(ConfigError, match=message):
        jaxspec.generate(tiny.target(), prompt, max_new_tokens=4)


class Wide(tiny.CharTokenizer):
    """A tokenizer with added tokens that the model's embedding has no rows for: ~ is one, and so is what begins a chat."""

    has_chat_template = True
    vocab = {**tiny.CharTokenizer.vocab, "~": tiny.VOCAB + 2}

    def apply_chat_template(self, messages):
        return [tiny.VOCAB, *(i for m in messages for i in self.encode(m["content"]))]


@pytest.mark.parametrize(
    "prompt, chat, message",
    [
        ("HI~", False, "prompt 0 holds token id 63; the vocabulary has ids 0 to 60"),
        (["HI", "~"], False, "prompt 1 holds token id 63"),
        ("HI", "auto", "prompt 0 holds token id 61"),
        ([{"role": "user", "content": "HI"}], True, "prompt 0 holds token id 61"),
        ([3, -1], "auto", "prompt 0 holds token id -1"),
        (np.array([3, 2**31 + 5]), "auto", "prompt 0 holds token id 2147483653"),
    ],
)
def test_no_prompt_may_have_ids_beyond_the_embedding(prompt, chat, message):
    model = jaxspec.ModelParams(tiny.target().tree, tiny.target().config, Wide())
    with pytest.raises(ConfigError, match=message):
        jaxspec.generate(model, prompt, chat=chat, max_new_tokens=2)


def test_no_history_may_have_ids_beyond_the_embedding(tmp_path):
    inserted, corpus = jaxspec.NgramHistory(), jaxspec.NgramHistory(NgramConfig(external_sam_budget=2))
    inserted.insert([1, tiny.VOCAB, 2])
    corpus.add_corpus(["A~"], Wide(), "notes")
    (tmp_path / "c.jsonl").write_text('"A~"\n')
    model = jaxspec.ModelParams(tiny.target().tree, tiny.target().config, Wide())
    for draft, message in ((inserted, "the NgramHistory holds token id 61"), (corpus, "corpus 'notes' holds token id 63")):
        with pytest.raises(ConfigError, match=f"{message}; the vocabulary has ids 0 to 60"):
            jaxspec.generate(tiny.target(), [1, 2], draft=draft, max_new_tokens=2)
    spec = jaxspec.SpecConfig(options={"external_corpus_path": str(tmp_path / "c.jsonl"), "external_sam_budget": 2})
    with pytest.raises(ConfigError, match="corpus .* holds token id 63"):
        jaxspec.generate(model, [1, 2], algorithm="NGRAM", spec=spec, max_new_tokens=2)
    corpus.remove_corpus("notes")
    assert len(jaxspec.generate(tiny.target(), [1, 2], draft=corpus, max_new_tokens=2).tokens) == 2
    with pytest.raises(ConfigError, match="the inserted text holds token id -4"):
        inserted.insert([1, -4])


def test_text_needs_a_tokenizer():
    model = jaxspec.ModelParams(tiny.target().tree, tiny.target().config)
    with pytest.raises(ConfigError, match="token ids"):
        jaxspec.generate(model, "HELLO")
    with pytest.raises(ConfigError, match="stop_token_ids"):
        jaxspec.generate(model, [1, 2], stop="A")
    assert jaxspec.generate(model, [1, 2], max_new_tokens=3).text is None


def test_no_tokens_may_be_asked_for(reference):
    prompts, expected = reference
    none = jaxspec.generate(tiny.target(), prompts[0], max_new_tokens=0)
    assert (none.tokens, none.text, none.finish_reason, none.from_draft) == ([], "", "length", [])
    assert (none.stats.completion_tokens, none.stats.rounds) == (0, 0)
    some = jaxspec.generate(tiny.target(), prompts[:2], draft=tiny.small_draft(), max_new_tokens=[0, 5])
    assert [r.tokens for r in some] == [[], expected[1][:5]]
    assert [c.tokens for c in jaxspec.stream(tiny.target(), prompts[0], max_new_tokens=0)] == [[]]


def test_times_add_up(reference):
    """What is compiled counts apart, once; what is left is not more than the call took."""
    prompts, _ = reference
    model = jaxspec.ModelParams(tiny.target().tree, tiny.target(max_positions=240).config, tiny.target().tokenizer)
    for compiles in (True, False):
        begun = time.perf_counter()
        results = jaxspec.generate(model, prompts, draft=tiny.small_draft(), max_new_tokens=[3, 9, 27, LENGTH])
        wall = time.perf_counter() - begun
        for stats in (r.stats for r in results):
            assert 0 < stats.time_to_first_token <= stats.prefill_seconds
            assert (stats.compile_seconds > 0) is compiles
            assert stats.prefill_seconds + stats.decode_seconds + stats.compile_seconds <= wall
            assert stats.prefill_seconds + stats.decode_seconds == pytest.approx(stats.end_to_end_seconds)
            assert stats.tokens_per_second == pytest.approx((stats.completion_tokens - 1) / stats.decode_seconds)


def test_a_draft_that_names_its_tokens_otherwise_is_refused():
    draft = tiny.small_draft()
    other = tiny.CharTokenizer()
    other.vocab = {token: (i + 1) % tiny.VOCAB for token, i in other.vocab.items()}
    with pytest.raises(ConfigError, match="vocabular"):
        jaxspec.generate(tiny.target(), "HI", draft=jaxspec.ModelParams(draft.tree, draft.config, other))


def test_a_pool_that_does_not_fit_says_what_to_lower(monkeypatch):
    kept.forget()
    monkeypatch.setattr(runtime, "available_bytes", lambda device=None: 1000)
    with pytest.raises(runtime.PoolTooLarge, match="needs .* bytes, 1,000 are available.*max_new_tokens.*fewer prompts.*tree"):
        jaxspec.generate(tiny.target(), "HELLO", draft=tiny.small_draft())


def test_activations_that_do_not_fit_say_what_to_lower(monkeypatch):
    kept.forget()
    runtime.forget_compiled()
    pool, check = [], runtime.check_memory
    monkeypatch.setattr("jaxspec.engine.memory.check_memory", lambda needed, *rest: pool.append(needed) or check(needed, *rest))
    monkeypatch.setattr(runtime, "available_bytes", lambda device=None: pool[-1] if pool else 1 << 30)
    with pytest.raises(runtime.PoolTooLarge, match=r"activations of '\w+' need [\d,]+ bytes.*prefill_chunk.*num_draft_tokens"):
        jaxspec.generate(tiny.target(), "HELLO " * 40, prefill_chunk=4096, page_size=1, max_new_tokens=1)
    kept.forget()


def test_a_call_takes_less_than_the_usual_pool_where_that_does_not_fit(monkeypatch, reference):
    prompts, expected = reference
    kept.forget()
    most = 1 << 20
    asked, check = [], runtime.check_memory
    monkeypatch.setattr(runtime, "available_bytes", lambda device=None: most)
    monkeypatch.setattr(
        "jaxspec.engine.memory.check_memory", lambda needed, *rest: asked.append(needed) or check(needed, *rest)
    )
    assert jaxspec.generate(tiny.target(), prompts[0], draft=tiny.small_draft(), max_new_tokens=LENGTH).tokens == expected[0]
    assert [n > most for n in asked] == [True, False]
    kept.forget()


def test_a_chain_of_another_length_warns():
    with pytest.warns(UserWarning, match="num_draft_tokens=9 with topk=1"):
        result = jaxspec.generate(
            tiny.target(), "HI", draft=tiny.small_draft(), num_steps=2, topk=1, num_draft_tokens=9, max_new_tokens=4
        )
    assert result.stats.num_draft_tokens == 3
