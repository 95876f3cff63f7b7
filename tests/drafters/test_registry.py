"""What an algorithm takes is declared once, and everything else is refused with the name of what there is."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from jaxspec import ConfigError, EagleOptions, NgramConfig, NgramHistory, PEagleOptions, SpecConfig, UnoOptions, cli
from jaxspec.drafters import registry
from jaxspec.drafters.kinds import KINDS, algorithm_of, format_of, formats, imported, shapes_of
from jaxspec.drafters.ngram.drafter import NgramDrafter
from tests import tiny
from tests.drafters import eagle_cases
from tests.specs import spec_of

WINDOW = dict(draft_window_size=3)
NOT_OPTIONS = {
    "ngram token map": ("ngram", dict(token_map=(1, 2)), "token_map=(1, 2) is not an option of algorithm='ngram': its options"),
    "ngram noise": ("ngram", dict(uno_noise="mask"), "uno_noise='mask' is not an option of algorithm='ngram'"),
    "ngram window": ("ngram", WINDOW, "its options are ngram_max_trie_depth, ngram_min_bfs_breadth"),
    "none": ("none", WINDOW, "draft_window_size=3 is not an option of algorithm='none': it has no options"),
    "standalone": ("standalone", dict(static_tree="0"), "static_tree='0' is not an option of algorithm='standalone'"),
    "peagle": ("peagle", dict(token_map=(1,)), "its options are draft_window_size, draft_sink_size (jaxspec.PEagleOptions)"),
    "nextn": ("nextn", dict(static_tree="0"), "not an option of algorithm='nextn'"),
    "dflash": ("dflash", dict(min_draft_survival=0.5), "not an option of algorithm='dflash'"),
    "another class": (
        "eagle3",
        dict(options=PEagleOptions(3)),
        "are not those of algorithm='eagle3': its options are draft_wi",
    ),
    "twice": ("uno", dict(uno_noise="mask", noise="hash"), "the option noise is given twice, once as noise='hash'"),
    "a bad value": ("uno", dict(noise="pink"), "uno_noise='pink' must be one of uniform, hash, mask"),
}
NOT_FIELDS = {
    "none with a tree": (
        "none",
        dict(num_steps=3, topk=1),
        "'none' takes none of num_steps, topk, num_draft_tokens: leave num_steps and topk unset (it drafts nothing)",
    ),
    "none with thresholds": ("none", dict(accept_threshold_acc=0.9), "accept_threshold_acc=0.9 has no effect with algorithm"),
    "none with blocks": ("none", dict(use_block_verification=True), "use_block_verification needs a chain with draft prob"),
    "ngram with a depth": ("ngram", dict(num_steps=3), "algorithm='ngram' takes num_draft_tokens alone: leave num_steps unset"),
    "ngram with blocks": ("ngram", dict(use_block_verification=True), "which algorithm='ngram' does not have: leave it unset"),
    "standalone by rejection": ("standalone", dict(use_rejection_sampling=True), "use_rejection_sampling needs a chain with"),
    "a tree by rejection": (
        "eagle3",
        dict(num_steps=2, topk=2, num_draft_tokens=4, use_rejection_sampling=True),
        "use_rejection_sampling checks chains only: topk=2 must be 1",
    ),
    "a static tree by blocks": ("eagle", dict(static_tree="0 00", use_block_verification=True), "be 1, without a static tree"),
}


@pytest.mark.parametrize("name", [*NOT_OPTIONS, *NOT_FIELDS])
def test_what_an_algorithm_lacks_is_an_error(name):
    algorithm, given, message = (NOT_OPTIONS | NOT_FIELDS)[name]
    spec = SpecConfig(**given) if "options" in given else spec_of(**given)
    with pytest.raises(ConfigError, match=re.escape(message)):
        registry.resolve(algorithm, spec, tiny.config())


def test_options_are_given_as_a_class_or_by_either_name():
    def options(algorithm, given):
        return registry.resolve(algorithm, SpecConfig(options=given), tiny.config()).options

    assert (
        options("ngram", {"ngram_match_type": "PROB"})
        == options("ngram", {"match_type": "prob"})
        == NgramConfig(match_type="PROB")
    )
    assert options("ngram", None) == NgramConfig()
    assert options("eagle", {"token_map": [2, 1]}) == EagleOptions(token_map=(2, 1))
    assert hash(EagleOptions(static_tree="0 1 00")) == hash(EagleOptions(static_tree=[[0], [1], [0, 0]]))
    with pytest.raises(ConfigError, match="options=7 must be an algorithm's options or a mapping"):
        SpecConfig(options=7)


def test_a_history_and_options_must_agree():
    history = NgramHistory(NgramConfig(match_type="PROB"))
    assert registry.resolve("ngram", SpecConfig(), tiny.config(), history).options == history.config
    with pytest.raises(ConfigError, match="those of the given NgramHistory"):
        registry.resolve("ngram", SpecConfig(options=NgramConfig(max_trie_depth=4)), tiny.config(), history)


def test_resolving_twice_changes_nothing_more():
    for algorithm in ("none", "ngram", "eagle", "peagle", "nextn", "standalone"):
        once = registry.resolve(algorithm, SpecConfig(), tiny.config())
        assert registry.resolve(algorithm, once, tiny.config()) == once


def test_prepare_is_all_that_an_engine_asks_for():
    name, spec, drafter, tree = registry.prepare("auto", tiny.target(), None, SpecConfig())
    assert (name, spec.num_draft_tokens, drafter, tree) == ("NGRAM", 12, NgramDrafter(12), None)
    target, head = eagle_cases.tiny_target(), eagle_cases.random_head("eagle3")
    name, spec, drafter, tree = registry.prepare("auto", target, head, spec_of(num_steps=2, topk=1, draft_window_size=4))
    assert (name, spec.num_draft_tokens, drafter.window, tree) == ("EAGLE3", 3, 4, head.tree)
    own, spec, drafter, tree = registry.prepare(drafter, target, head.tree, SpecConfig())
    assert (own, spec, tree) == ("EAGLE3", SpecConfig(options=registry.find("none").options()), head.tree)
    with pytest.raises(ConfigError, match="algorithm='eagle9' is not known; known: auto, none, ngram, eagle"):
        registry.prepare("eagle9", target, None, SpecConfig())


def test_every_record_is_whole():
    for kind in KINDS.values():
        assert callable(imported(kind.build)) and (kind.resolve is None or callable(imported(kind.resolve)))
        assert imported(kind.training) is None or imported(kind.training).OPTIONS
        assert kind.example is None or algorithm_of(imported(kind.example)(tiny.config(layers=5))) == kind.name
    for form in formats().values():
        assert all(callable(imported(x)) for source in form.sources for x in (source.matches, source.open))
        assert all(x is None or callable(imported(x)) for x in (form.export, form.within_target))
    config = eagle_cases.random_head("peagle").config
    assert (algorithm_of(config), format_of(config).stored, "mask_hidden" in shapes_of(config)) == ("PEAGLE", "eagle", True)
    assert algorithm_of(tiny.config()) == "STANDALONE" and algorithm_of(None) is None
    for index in (-1, config.layers.vocab_size):
        with pytest.raises(ConfigError, match=f"mask_token_id, a row of the embedding, holds token id {index}"):
            dataclasses.replace(config, mask_token_id=index)


def test_flags_become_options_and_those_that_do_not_fit_are_named():
    parser = argparse.ArgumentParser()
    cli.add_spec_arguments(parser)
    spec = cli.spec_from(parser.parse_args(["--uno-noise", "hash", "--speculative-uno-mask-token-id", "7"]))
    assert registry.make_options(UnoOptions, spec.options, "UNO") == UnoOptions("hash", 7)
    with pytest.raises(ConfigError, match="uno_noise='hash' is not an option of algorithm='eagle3'"):
        registry.resolve("eagle3", spec, tiny.config())
    spec = cli.spec_from(parser.parse_args(["--static-tree", "0 1 00", "--token-map", "ids.npy"]))
    assert registry.resolve("eagle", spec, tiny.config()).num_draft_tokens == 4
    assert cli.spec_from(parser.parse_args([])) == SpecConfig()
