"""From SpecConfig to the drafter and its history."""

import json
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.ngram import drafter as ngram
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.history import NgramHistory
from tests import tiny


def test_a_corpus_in_the_parameters_becomes_a_parameter_of_the_drafter(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps("abcd"))
    spec = SpecConfig(options=NgramConfig(external_corpus_path=str(path), external_sam_budget=2))
    spec = registry.resolve("NGRAM", spec, tiny.config())
    target = SimpleNamespace(tokenizer=lambda text: list(text.encode()), config=SimpleNamespace(vocab_size=256))
    drafter, params = ngram.build(target, None, spec)
    assert drafter.num_draft_tokens == 12 and drafter.config.external_corpus_path == str(path)
    assert [corpus.tokens[:4].tolist() for corpus in params.corpora] == [list(b"abcd")]


def test_a_given_history_brings_its_own_match_parameters_and_contents():
    spec = registry.resolve("NGRAM", SpecConfig(num_draft_tokens=5), tiny.config())
    assert ngram.build(None, None, spec) == (ngram.NgramDrafter(5), None)
    given = NgramHistory(NgramConfig(max_trie_depth=3, device_nodes=64))
    spec = registry.resolve("NGRAM", SpecConfig(num_draft_tokens=5), tiny.config(), given)
    target = SimpleNamespace(tokenizer=None, config=SimpleNamespace(vocab_size=9))
    drafter, params = ngram.build(target, given, spec)
    assert drafter == ngram.NgramDrafter(5, given.config) and params.trie is given.arrays().trie
    given.insert([1, 2])
    same, later = ngram.build(target, given, spec)
    assert same == drafter and later.trie is not params.trie


def test_parameters_of_other_algorithms_are_refused():
    with pytest.raises(ConfigError, match="num_steps and topk"):
        registry.resolve("NGRAM", SpecConfig(num_steps=3, topk=1, num_draft_tokens=4), tiny.config())
    with pytest.raises(ConfigError, match="external_sam_budget=12"):
        registry.resolve("NGRAM", SpecConfig(options={"ngram_external_sam_budget": 12}), tiny.config())


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
