"""STANDALONE with a draft whose vocabulary is not quite the target's: padding, added tokens, names of reserved ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError
from jaxspec.drafters.standalone.vocabulary import CommonVocabulary, common_vocabulary, paired_vocabulary
from jaxspec.models.decoder import init_params
from tests import tiny

TREES = {"chain": (3, 1, 4), "tree": (3, 2, 6)}


class Words:
    """A tokenizer of which only the vocabulary matters."""

    has_chat_template = False

    def __init__(self, words):
        self.vocab = words

    def encode(self, text, add_special_tokens=True):
        return [self.vocab[word] for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        names = {i: word for word, i in self.vocab.items()}
        return " ".join(names.get(i, "?") for i in ids)


def words(count: int, **others: int) -> Words:
    return Words({f"w{i}": i for i in range(count) if i not in others.values()} | others)


def model(rows: int, tokenizer, **changes) -> jaxspec.ModelParams:
    config = dataclasses.replace(tiny.config(vocab=rows), **changes)
    return jaxspec.ModelParams(init_params(config, jax.random.key(3)), config, tokenizer, source=f"{rows} rows")


CASES = {  # rows and tokenizer of the target, of the draft; size and foreign ids of what they have in common
    "padding of the target": (72, words(60), 64, words(60), 64, ()),
    "padding of the draft": (64, words(60), 72, words(60), 64, ()),
    "added to the target": (64, words(60, tool=60, think=61), 64, words(60), 60, ()),
    "added to the draft, more padding": (64, words(60), 80, words(60, tool=60, pad=70), 60, ()),
    "a reserved token with a name": (64, words(60, tool=30), 64, words(60, reserved=30), 60, (30,)),
    "fewer rows than the target has tokens": (72, words(70), 64, words(60), 60, ()),
    "no tokenizers": (72, None, 64, None, 64, ()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_two_vocabularies_have_in_common(case):
    rows, ours, draft_rows, theirs, size, foreign = case
    found = common_vocabulary(model(rows, ours), model(draft_rows, theirs))
    assert (found.size, found.foreign) == (size, foreign)


def test_equal_vocabularies_need_no_restriction():
    assert common_vocabulary(model(64, words(60)), model(64, words(60))) is None


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("case", ["padding of the target", "padding of the draft", "a reserved token with a name"])
def test_any_token_of_the_target_is_emitted_and_the_answer_is_its_own(case, tree):
    """The target is pushed towards ids that the draft lacks; between them the draft's text is accepted."""
    rows, ours, draft_rows, theirs, size, foreign = CASES[case]
    target, draft = model(rows, ours), model(draft_rows, theirs)
    steps, topk, nodes = tree
    alien = [*foreign, *range(size, rows)]
    prompts = [[1, 2, 3], [*alien[:2], 5, 9, *alien[-1:], 7]]
    ask = dict(max_new_tokens=20, temperature=0.0, logit_bias=dict.fromkeys(alien, 0.4), ignore_eos=True)
    expected = jaxspec.generate(target, prompts, algorithm="none", **ask)
    found = jaxspec.generate(
        target, prompts, draft=draft, algorithm="standalone", num_steps=steps, topk=topk, num_draft_tokens=nodes, **ask
    )
    assert [a.tokens for a in found] == [a.tokens for a in expected]
    if alien:
        assert any(set(a.tokens) & set(alien) for a in expected)


def test_a_draft_with_padding_is_accepted_as_without():
    """The same weights below the padding: whatever the padding holds is never drafted, so that all drafts are accepted."""
    target = model(64, words(60))
    rows = dataclasses.replace(target.config, vocab_size=80)
    pad = lambda x, axis: jnp.pad(x, [(0, 16 if i == axis else 0) for i in range(x.ndim)], constant_values=9.0)  # noqa: E731
    tree = dict(target.tree)
    tree["embedder"] = {"embedding": pad(tree["embedder"]["embedding"], 0)}
    head = jax.tree.leaves(tree["head"])
    assert len(head) == 1 and head[0].shape[-1] == 64
    tree["head"] = jax.tree.map(lambda x: pad(x, x.ndim - 1), tree["head"])
    draft = jaxspec.ModelParams(tree, rows, words(60), source="padded")
    ask = dict(algorithm="standalone", num_steps=3, topk=1, num_draft_tokens=4, max_new_tokens=24, ignore_eos=True)
    same, padded = (jaxspec.generate(target, [[1, 2, 3]], draft=d, **ask)[0] for d in (target, draft))
    assert padded.tokens == same.tokens and padded.stats.rounds == same.stats.rounds <= 7


def test_ids_are_mapped_and_logits_restricted():
    vocabulary = CommonVocabulary(6, (2,), stand_in=4)
    assert vocabulary.as_draft_ids({}, jnp.asarray([[0, 2, 5], [6, 99, 1]])).tolist() == [[0, 4, 5], [4, 4, 1]]
    logits = vocabulary.restrict({}, jnp.arange(8.0))
    assert logits.shape == (6,) and np.flatnonzero(np.isinf(logits)).tolist() == [2] and len(vocabulary) == 5


def test_what_the_draft_lacks_is_fed_as_its_end_mark():
    draft = model(64, words(60), stop_token_ids=(63, 17))
    assert common_vocabulary(model(72, words(60)), draft).stand_in == 63
    assert common_vocabulary(model(72, words(70)), draft).stand_in == 17


def test_another_vocabulary_is_refused_with_the_first_difference():
    shuffled = Words({f"w{(i * 7) % 60}": i for i in range(60)})
    with pytest.raises(ConfigError, match=r"share 6 of 60 and 60 tokens; the first difference is id 1, 'w1' .* 'w7'"):
        common_vocabulary(model(64, words(60)), model(64, shuffled))
    other = Words({f"x{i}": i for i in range(60)})
    with pytest.raises(ConfigError, match="share 0 of 60 and 60 tokens; the first difference is id 0, 'w0' .* 'x0'"):
        common_vocabulary(model(64, words(60)), model(64, other))
    shifted = Words({f"w{i - 1}": i for i in range(1, 60)} | {"x": 0})
    with pytest.raises(ConfigError, match="the first difference is id 0"):
        common_vocabulary(model(64, words(60)), model(64, shifted))


def test_more_beams_than_common_tokens_are_refused():
    with pytest.raises(ConfigError, match="topk=5 is more than the 4 tokens"):
        jaxspec.generate(
            model(64, words(4)),
            [[1]],
            draft=model(64, Words(words(4).vocab | {"x": 4})),
            algorithm="standalone",
            num_steps=2,
            topk=5,
            num_draft_tokens=6,
        )


# Other tokenizers: tokens that read alike are pairs.


class Letters(Words):
    """A tokenizer that reads the longest tokens it knows, from the left; what it does not know it leaves out."""

    def encode(self, text, add_special_tokens=True):
        ids = []
        while text:
            found = max((t for t in self.vocab if t and text.startswith(t)), key=len, default=None)
            ids += [] if found is None else [self.vocab[found]]
            text = text[len(found) if found else 1 :]
        return ids


def shuffled_copy(target: jaxspec.ModelParams, tokenizer, order: np.ndarray) -> jaxspec.ModelParams:
    """The same model with its tokens in another order: row i of its tables is the row order[i] of the target's."""
    tree = dict(target.tree)
    tree["embedder"] = {"embedding": tree["embedder"]["embedding"][order]}
    tree["head"] = jax.tree.map(lambda x: x[..., order], tree["head"])
    return jaxspec.ModelParams(tree, target.config, tokenizer, source="shuffled")


STRINGS = {"options": {"pairing": "strings"}}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_draft_with_its_tokens_in_another_order_is_accepted_as_without(tree):
    steps, topk, nodes = tree
    target = model(60, words(60))
    order = np.random.default_rng(0).permutation(60)
    draft = shuffled_copy(target, Words({f"w{order[i]}": i for i in range(60)}), order)
    ask = dict(max_new_tokens=24, ignore_eos=True, num_steps=steps, topk=topk, num_draft_tokens=nodes)
    with pytest.raises(ConfigError, match="standalone_pairing='strings' pairs tokens that read alike"):
        jaxspec.generate(target, [[1, 2, 3]], draft=draft, **ask)
    same = jaxspec.generate(target, [[1, 2, 3]], draft=target, **ask)[0]
    paired = jaxspec.generate(target, [[1, 2, 3]], draft=draft, spec=jaxspec.SpecConfig(**STRINGS), **ask)[0]
    assert paired.tokens == same.tokens and paired.stats.rounds == same.stats.rounds
    assert paired.from_draft == same.from_draft and sum(paired.from_draft) > 12


def test_half_a_vocabulary_in_common_changes_no_answer():
    """Drafts come from the pairs alone; the target's other tokens reach the draft as what its tokenizer makes of them."""
    target = model(60, words(60))
    order = np.random.default_rng(1).permutation(60)
    alien = order[:30]
    names = {f"x{i}" if i in set(alien.tolist()) else f"w{i}": at for at, i in enumerate(order.tolist())}
    draft = shuffled_copy(target, Letters(names), order)
    ask = dict(max_new_tokens=40, ignore_eos=True)
    plain = jaxspec.generate(target, [[1, 2, 3], [7, 8]], algorithm="none", **ask)
    found = jaxspec.generate(
        target,
        [[1, 2, 3], [7, 8]],
        draft=draft,
        num_steps=3,
        topk=2,
        num_draft_tokens=6,
        spec=jaxspec.SpecConfig(**STRINGS),
        **ask,
    )
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    drafted = {t for r in found for t, d in zip(r.tokens, r.from_draft, strict=True) if d}
    assert drafted and not drafted & set(alien.tolist())


def test_tokens_are_compared_by_what_they_add_to_a_text():
    """Byte-level BPE writes a space as Ġ and é as two letters, SentencePiece has ▁ and tokens for single bytes."""
    ours = Letters({"Ġthe": 0, "Ã©": 1, "Ċ": 2, "<|end|>": 3, "Ġtheatre": 4, "Ã": 5})
    theirs = Letters({"▁the": 3, "é": 2, "<0x0A>": 1, "</s>": 0, "atre": 4, " the": 6, "e": 7})
    target, draft = model(8, ours), model(8, theirs, stop_token_ids=(0,))
    with pytest.warns(UserWarning, match="3 of the draft's 7 tokens are tokens of the target as well"):
        vocabulary, maps = paired_vocabulary(target, draft)
    assert len(vocabulary) == 3
    assert np.asarray(maps["to_target"]).tolist() == [-1, 2, 1, 0, -1, -1, -1, -1]
    # "<|end|>" is read as its letters' last known one, " theatre" as " the" and "atre", half a letter as the end mark.
    assert np.asarray(maps["to_draft"]).tolist() == [3, 2, 1, 7, 4, 0, 0, 0]


def test_pairs_need_tokenizers_and_enough_of_them():
    spec = jaxspec.SpecConfig(**STRINGS)
    with pytest.raises(ConfigError, match="the draft has no tokenizer"):
        jaxspec.generate(model(64, words(60)), [[1]], draft=model(64, None), algorithm="standalone", spec=spec)
    few = Letters({"w1": 0} | {f"x{i}": i for i in range(1, 60)})
    with (
        pytest.warns(UserWarning, match="1 of the draft's 60 tokens"),
        pytest.raises(ConfigError, match="topk=2 is more than the 1 tokens"),
    ):
        jaxspec.generate(
            model(64, words(60)),
            [[1]],
            draft=model(64, few),
            algorithm="standalone",
            spec=spec,
            num_steps=2,
            topk=2,
            num_draft_tokens=4,
        )
    with pytest.raises(ConfigError, match="standalone_pairing='letters' must be one of ids, strings"):
        jaxspec.StandaloneOptions("letters")
