"""Self-synthesis: templates taken apart, who speaks when, and that what counts as an answer is the target's own words."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.config import ConfigError
from jaxspec.models.forward import forward
from jaxspec.tokenizer.tokenizer import Tokenizer
from jaxspec.training import synthesis
from jaxspec.training.dialogue import OPENERS, script_of
from jaxspec.training.synthesis import SynthesisOptions, synthesise
from tests import tiny

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<turn>", "<turn|>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", " ", "\n", "?"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *LETTERS, "[unk]"])}

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% else %}"
    "{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
TURNS = (
    "<s>{% for m in messages %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def tokenizer(template):
    """One character a token, and special tokens."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL)
    ]
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[unk]"}
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    return Tokenizer(json.dumps(definition), template)


@functools.cache
def target(template=CHATML, **changes):
    """A random model with a chat template; its logits are spread so that it samples varied text, ends of turns included."""
    end = VOCABULARY["<|im_end|>" if template is CHATML else "</s>" if template is INST else "<turn|>"]
    made = tiny.target(vocab=len(VOCABULARY), stop_token_ids=(end,), **changes)
    return jaxspec.ModelParams(made.tree, made.config, tokenizer(template), source="tiny dialogues")


def small(**changes):
    return SynthesisOptions(
        **{
            "tokens": 500,
            "length": 64,
            "rows": 8,
            "longest_user": 9,
            "longest_answer": 15,
            "segment": 24,
            "opener_share": 0.0,
            **changes,
        }
    )


def text(ids, template=CHATML):
    return tokenizer(template).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "template, prefix, middle, close",
    [
        (
            CHATML,
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\n",
        ),
        (INST, "<s>[INST]", "[/INST]", "</s>[INST]"),
        (TURNS, "<s><turn>user\n", "<turn|>\n<turn>model\n", "<turn|>\n<turn>user\n"),
    ],
)
def test_templates_are_taken_apart(template, prefix, middle, close):
    config = target(template).config
    script = script_of(tokenizer(template), config)
    assert [text(part, template) for part in (script.prefix, script.middle, script.close)] == [prefix, middle, close]
    assert script.dialogue and script.ends == config.stop_token_ids


def test_a_template_that_hides_words_is_refused():
    hidden = "<s>{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="chat template"):
        script_of(tokenizer(hidden), target().config)


def test_ids_beyond_the_embedding_are_refused():
    small_model = tiny.target(vocab=len(VOCABULARY) - 2)  # "[unk]" and "?" have no rows
    for template, prompts, message in (
        (CHATML, [["what?"]], "prompt 1 holds token id"),
        (CHATML, [["so"], ["so", "why?"]], "prompt 2 holds token id"),
        (CHATML.replace("be kind", "be kind?"), [["so"]], "chat template .* holds token id"),
    ):
        model = jaxspec.ModelParams(small_model.tree, small_model.config, tokenizer(template))
        with pytest.raises(ConfigError, match=message):
            synthesise(model, small(), prompts=prompts, progress=False)


@pytest.mark.parametrize("template", [CHATML, INST, TURNS])
def test_rows_are_dialogues_in_which_answers_count(template):
    made = synthesise(target(template), small(), progress=False)
    assert made.tokens.shape == made.supervised.shape == (8, 64)
    script = script_of(tokenizer(template), target(template).config)
    for tokens, counts in zip(made.tokens.tolist(), made.supervised.tolist(), strict=True):
        place, turn = len(script.prefix), 0
        assert tuple(tokens[:place]) == script.prefix and not any(counts[:place])
        while place < 64:  # users' words, `middle`, an answer, `close`, users' words, …
            user = turn % 2 == 0
            words, end = 0, script.middle[0] if user else script.close[0]
            while place < 64 and tokens[place] != end:
                assert counts[place] is not user
                words, place = words + 1, place + 1
            assert words <= (8 if user else 14)
            if place < 64:
                capped = words == (8 if user else 14)
                assert words >= 3 or not user
                assert counts[place] is (not user and not capped), "an end of turn that was not forced is the target's, too"
            rest = (script.middle if user else script.close)[1 : 64 - place]
            assert tuple(tokens[place + 1 : place + 1 + len(rest)]) == rest and not any(
                counts[place + 1 : place + 1 + len(rest)]
            )
            place, turn = place + 1 + len(rest), turn + 1


@pytest.mark.parametrize(
    "changes", [{}, {"windows": (5, None), "attention_softcap": 2.0, "logit_softcap": 3.0, "sandwich_norms": True}]
)
def test_greedy_answers_are_those_of_the_whole_forward(changes):
    params = target(**changes)
    made = synthesise(params, small(temperatures=(0.0,)), progress=False)
    best = np.asarray(jnp.argmax(forward(params, made.tokens).logits, -1))[:, :-1]
    counts = made.supervised[:, 1:]
    assert counts.sum() > 50
    np.testing.assert_array_equal(made.tokens[:, 1:][counts], best[counts])


def test_sampling_follows_the_temperature():
    """The first answered token behind one fixed prompt, over many rows, against the softmax."""
    params = target()
    options = small(tokens=1, rows=4096, length=80, temperatures=(0.7,))
    made = synthesise(params, options, prompts=[["abc"]], progress=False)
    first = made.supervised[0].argmax()
    assert (made.tokens[:, :first] == made.tokens[0, :first]).all() and made.supervised[:, first].all()
    assert len(made.tokens) > 4000, "few are equal to another row, or repeat themselves"
    logits = np.asarray(forward(params, made.tokens[0, :first]).logits[-1], np.float64) / 0.7
    p = np.exp(logits - logits.max())
    p /= p.sum()
    found = np.bincount(made.tokens[:, first], minlength=len(p)) / len(made.tokens)
    assert np.abs(found - p).max() < 5 * np.sqrt(p.max() / 4096)


def test_the_seed_decides_everything():
    first, again = (synthesise(target(), small(), progress=False) for _ in range(2))
    other = synthesise(target(), small(seed=1), progress=False)
    for name in ("tokens", "supervised", "temperatures"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert (first.tokens != other.tokens).any()


def test_given_prompts_are_answered_in_turn():
    made = synthesise(target(), small(tokens=128, rows=2, length=96), prompts=[["who", "why"], ["how"]], progress=False)
    first, second = (text(row) for row in made.tokens)
    assert first.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n")
    follow_up = first.split("<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n")
    assert len(follow_up) == 2 and "<|im_start|>user\nhow<|im_end|>" in second


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(synthesis.runtime, "compiled", lambda *args, **static: pytest.fail("rows were written"))
    with pytest.raises(ConfigError, match=r"prompt 30 takes 1\d\d tokens .* no room"):
        synthesise(target(), small(tokens=64 * 8 * 9), prompts=[["a"]] * 29 + [["a" * 80]], progress=False)
    with pytest.raises(ConfigError, match="no room"):
        synthesise(target(), small(length=20), progress=False)
    with pytest.raises(ConfigError, match="no prompts"):
        synthesise(target(), small(), prompts=[], progress=False)


@pytest.mark.parametrize("prompts", [None, [["a"], ["who are you"], ["how", "why so"], ["bee"]]])
def test_all_batches_are_of_one_shape(monkeypatch, prompts):
    shapes = set()

    def compiled(function, tree, pieces, *rest, **static):
        shapes.add(pieces.tokens.shape)
        return lambda *args: (np.random.default_rng(len(shapes)).integers(0, 41, (2, 96)), np.ones((2, 96), bool)), 0.0

    monkeypatch.setattr(synthesis.runtime, "compiled", compiled)
    made = synthesise(target(), small(tokens=2 * 96 * 20, rows=2, length=96, opener_share=0.5), prompts=prompts, progress=False)
    assert len(shapes) == 1 and made.about["rows_written"] == 40


def test_greedy_copies_of_a_prompt_are_dropped():
    notes = []
    options = small(tokens=8 * 64, temperatures=(0.0,), user_temperature=0.0, least_distinct=0.0)
    made = synthesise(target(), options, prompts=[["who"], ["why"]], progress=False, log=notes.append)
    assert len(made.tokens) == 2 and made.about["rows_dropped_as_copies"] == 6 and made.about["rows_dropped_for_overlap"] == 0
    assert "6 that are equal to another one" in notes[0] and "dropped: 0 for an overlap" in notes[0]


def test_a_plain_text_of_every_row_begins_in_its_own_way():
    made = synthesise(tiny.target(), small(tokens=64 * 64, rows=64, temperatures=(0.0,)), progress=False)
    assert made.about["rows_dropped_as_copies"] <= 2 and len({row.tobytes() for row in made.tokens}) == len(made.tokens)
    kept, held_out = made.split(20)
    assert not {row.tobytes() for row in kept.tokens} & {row.tobytes() for row in held_out.tokens}


def test_some_users_begin_as_they_are_told():
    made = synthesise(target(), small(opener_share=1.0), progress=False)
    start = len(script_of(target().tokenizer, target().config).prefix)
    openers = {tuple(target().tokenizer.encode(o, add_special_tokens=False)) for o in OPENERS}
    for row in made.tokens.tolist():
        assert any(tuple(row[start : start + len(o)]) == o[: 64 - start] for o in openers)


def test_rows_that_overlap_with_excluded_prompts_are_dropped():
    before = synthesise(target(), small(), progress=False)
    excluded = [before.tokens[2, 48:61].tolist()]
    after = synthesise(target(), small(), exclude=excluded, progress=False)
    assert after.about["rows_dropped_for_overlap"] == 8 - len(after.tokens) >= 1
    assert not any((row == before.tokens[2]).all() for row in after.tokens)
    with pytest.raises(ConfigError, match="overlap"):
        synthesise(target(), small(), exclude=before.tokens.tolist(), progress=False)


def test_without_a_template_all_is_one_text():
    plain = tiny.target()
    made = synthesise(plain, small(), progress=False)
    assert made.supervised[:, 3:].all() and not made.supervised[:, :3].any()


def test_without_a_tokenizer_rows_begin_with_random_ids():
    plain = tiny.target()
    bare = jaxspec.ModelParams(plain.tree, dataclasses.replace(plain.config, stop_token_ids=(3,)), None, source="bare")
    made = synthesise(bare, small(), progress=False)
    assert not made.supervised[:, :4].any() and len({tuple(row[:4]) for row in made.tokens}) == 8
    after_end = np.roll(made.tokens == 3, 1, axis=1) & ~made.supervised
    assert (made.tokens[:, 4:][~made.supervised[:, 4:]] == 3).all() and after_end[:, 4:].any(), "an end begins a new text"
    with pytest.raises(ConfigError, match="tokenizer"):
        synthesise(bare, small(), prompts=[["a"]], progress=False)


def test_options_are_checked():
    with pytest.raises(ConfigError, match="temperatures"):
        SynthesisOptions(temperatures=())
    with pytest.raises(ConfigError, match="rows"):
        SynthesisOptions(rows=0)
    with pytest.raises(ConfigError, match="context"):
        synthesise(target(), small(length=1000), progress=False)
