"""From SpecConfig to the drafter and its history."""

import json
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters import ngram, registry
from jaxspec.drafters.ngram_config import NgramConfig
from jaxspec.drafters.ngram_history import NgramHistory
from tests import tiny


def test_a_corpus_in_the_parameters_is_loaded_once(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps("abcd"))
    spec = SpecConfig(options=NgramConfig(external_corpus_path=str(path), external_sam_budget=2))
    spec = registry.resolve("NGRAM", spec, None)
    target = SimpleNamespace(tokenizer=lambda text: list(text.encode()))
    history = ngram.history(target, None, spec)
    assert list(history.corpora) == [str(path)] and history.match(list(b"b"), 8).paths() == {(99,), (99, 100)}
    drafter, params = ngram.build(target, history, spec)
    assert params is None and drafter.use_trie and drafter.num_draft_tokens == 12 and drafter.config == history.config
    assert len(drafter.refresh((), history).corpora) == 1


def test_a_given_history_is_kept_and_none_is_made_without_a_corpus():
    given = NgramHistory()
    spec = registry.resolve("NGRAM", SpecConfig(num_draft_tokens=5), None)
    assert ngram.history(None, given, spec) is given and ngram.history(None, None, spec) is None
    assert not ngram.build(None, None, spec)[0].use_trie


def test_parameters_of_other_algorithms_are_refused():
    with pytest.raises(ConfigError, match="num_steps and topk"):
        registry.resolve("NGRAM", SpecConfig(num_steps=3, topk=1, num_draft_tokens=4), None)
    with pytest.raises(ConfigError, match="external_sam_budget=12"):
        registry.resolve("NGRAM", SpecConfig(options={"ngram_external_sam_budget": 12}), None)


def test_output_with_history_and_corpus_equals_plain_decoding():
    prompts = tiny.prompts(3)
    options = {"max_new_tokens": 24, "ignore_eos": True}
    plain = jaxspec.generate(tiny.target(), prompts, algorithm="none", **options)
    history = NgramHistory(NgramConfig(match_type="PROB", external_sam_budget=2, device_nodes=2048, max_trie_depth=6))
    history.add_corpus(["corpus"], lambda _: plain[0].tokens)
    options["num_draft_tokens"] = 6
    before = jaxspec.generate(tiny.target(), prompts, draft=history, **options)
    after = jaxspec.generate(tiny.target(), prompts, draft=history, **options)
    for a, b, c in zip(plain, before, after, strict=True):
        assert a.tokens == b.tokens == c.tokens
    assert all(b.stats.rounds >= c.stats.rounds for b, c in zip(before, after, strict=True))
    assert after[0].stats.rounds < len(plain[0].tokens) // 2
