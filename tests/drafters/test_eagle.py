"""The EAGLE drafter inside the round: an oracle, static trees, token maps, windows, parameters, compilation."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, SamplingParams, SpecConfig, generate
from jaxspec.drafters import registry
from jaxspec.drafters.eagle.drafter import EagleDrafter
from jaxspec.drafters.token_map import load_token_map
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import LayerKV
from jaxspec.round import draft
from jaxspec.sampling import row_keys, sampling_state
from jaxspec.trees.sampled_chain import sampled_chain
from jaxspec.trees.static_tree import EAGLE1_TREE, StaticTree
from tests.drafters.batch_checks import assert_caches_are_updated_in_place, assert_every_draft_is_accepted, count_traces
from tests.drafters.eagle_cases import prompts, random_head, tiny_target, trained
from tests.parity.checks.statistics import p_value
from tests.specs import spec_of


class OracleDrafter(EagleDrafter):
    """Knows the target's answers: the "state" behind pair p is p itself, whose logits are those of answers[p + 2].

    Whatever feeds it a wrong pair, position or row of the batch makes it guess wrong.
    """

    def run(self, params, ctx, tokens, hidden, layers, positions, valid, *entries):
        del entries
        pair = jnp.take_along_axis(params["answers"], jnp.minimum(positions + 1, params["answers"].shape[1] - 1), 1)
        found = jnp.where((pair == tokens) & valid, positions, 0)
        return jnp.broadcast_to(found[..., None].astype(hidden.dtype), hidden.shape), layers

    def logits(self, params, ctx, hidden):
        position = hidden[..., 0].astype(jnp.int32).reshape(hidden.shape[0], -1)
        index = jnp.minimum(position + 2, params["answers"].shape[1] - 1)
        token = jnp.take_along_axis(params["answers"], index, 1)
        return 9.0 * jax.nn.one_hot(token.reshape(hidden.shape[:-1]), ctx.config.vocab_size)


def batch_for(target, ids, **options) -> Batch:
    return open_batch(target, ids, **{"max_new_tokens": 24, "ignore_eos": True, **options})


@pytest.mark.parametrize("tree", [(4, 1, 5), (4, 3, 14)])
def test_an_oracle_draft_is_always_accepted(tree):
    target, (steps, topk, nodes) = tiny_target(), tree
    ids, new = prompts(24), 1 + 6 * (tree[0] + 1)
    answers = generate(target, ids, algorithm="none", max_new_tokens=new, ignore_eos=True)
    batch = batch_for(
        target,
        ids,
        draft=random_head("eagle3"),
        max_new_tokens=new,
        prefill_chunk=4,
        spec=SpecConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes),
    )
    table = np.zeros((len(ids), batch.state.tokens.shape[1]), np.int32)
    for row, prompt, answer in zip(table, ids, answers, strict=True):
        row[: len(prompt) + new] = prompt + answer.tokens
    fields = {f.name: getattr(batch.program.drafter, f.name) for f in dataclasses.fields(EagleDrafter)}
    fields["draft"] = dataclasses.replace(fields["draft"], reduced_vocab=False, draft_vocab_size=24)
    batch.program = dataclasses.replace(batch.program, drafter=OracleDrafter(**fields))
    batch.draft_tree = batch.draft_tree | {"answers": jnp.asarray(table)}
    assert_every_draft_is_accepted(batch, answers, steps)


def proposed(target, head, spec: SpecConfig, ids=None, **options):
    """The tree proposed behind the prompts, and the batch."""
    batch = batch_for(target, ids or prompts(target.config.vocab_size), draft=head, spec=spec, **options)
    batch.prefill()
    run = jax.jit(draft, static_argnums=0)
    return run(batch.program, target.tree, batch.draft_tree, batch.state)[1], batch


def test_eagle1_static_tree_has_the_published_shape():
    tree = StaticTree.parse(EAGLE1_TREE)
    assert len(tree.paths) == 25
    assert tree.max_depth == 5
    assert tree.num_ranks == 4
    leaves = [i for i in range(1, 26) if i not in tree.inner]
    assert len(leaves) == 15


def test_a_static_tree_holds_the_ranks_it_names():
    target, head = tiny_target(), random_head("eagle")
    spec = spec_of(static_tree="0 1 2 00 01 10 000")
    tree, _ = proposed(target, head, spec)
    dynamic, _ = proposed(target, head, SpecConfig(num_steps=3, topk=3, num_draft_tokens=22))  # every candidate
    assert tree.parent[0].tolist() == [-1, 0, 0, 0, 1, 1, 2, 4]
    paths = StaticTree.of(spec.options["static_tree"]).paths
    for row in range(tree.tokens.shape[0]):
        by_rank = {(): 0}
        for node in range(1, 22):  # siblings of a dynamic tree stand in order of their probability
            parent = int(dynamic.parent[row, node])
            above = next(p for p, i in by_rank.items() if i == parent)
            rank = sum(1 for p in by_rank if p[:-1] == above and len(p) == len(above) + 1)
            by_rank[(*above, rank)] = node
        for node, path in enumerate(paths):
            if path in by_rank:
                assert tree.tokens[row, node + 1] == dynamic.tokens[row, by_rank[path]]


def test_a_token_map_keeps_the_order_of_the_tokens_it_holds():
    target, head = trained("e2e_eagle2")
    full, _ = proposed(target, head, SpecConfig(num_steps=1, topk=14, num_draft_tokens=15))
    kept = (11, 2, 7, 3, 5, 0)
    cut, _ = proposed(target, head, spec_of(num_steps=1, topk=6, num_draft_tokens=7, token_map=kept))
    for row, expected in zip(np.asarray(cut.tokens), np.asarray(full.tokens), strict=True):
        assert row[1:].tolist() == [t for t in expected[1:].tolist() if t in kept]
    with pytest.raises(ConfigError, match="topk=7 exceeds the draft's vocabulary of 6"):
        proposed(target, head, spec_of(num_steps=1, topk=7, num_draft_tokens=8, token_map=kept))
    with pytest.raises(ConfigError, match="names id 14, the target's vocabulary has 14"):
        proposed(target, head, spec_of(num_steps=1, topk=1, token_map=(1, 14)))
    with pytest.raises(ConfigError, match="EAGLE3 draft has a head of its own"):
        proposed(*trained("e2e_eagle3"), spec_of(num_steps=1, topk=1, token_map=kept))


def test_a_token_map_of_a_tied_or_quantised_head():
    from jaxspec.drafters.token_map import apply_token_map

    head = random_head("eagle")
    tied = tiny_target(tie_embeddings=True)
    made = apply_token_map(head, tied, (3, 1)).tree["head"]["kernel"]
    np.testing.assert_array_equal(made, tied.tree["embedder"]["embedding"][jnp.array([3, 1])].T)
    plain = tiny_target()
    q = {"q": jnp.arange(16 * 24, dtype=jnp.int8).reshape(16, 24), "scale": jnp.arange(24.0)}
    quantised = jaxspec.ModelParams({**plain.tree, "head": {"kernel": q}}, plain.config)
    kernel = apply_token_map(head, quantised, (3, 1)).tree["head"]["kernel"]
    np.testing.assert_array_equal(kernel["q"], q["q"][:, jnp.array([3, 1])])
    assert kernel["scale"].tolist() == [3.0, 1.0]


def test_token_maps_are_read_from_files(tmp_path):
    ids = [5, 0, 9]
    np.save(tmp_path / "map.npy", np.array(ids))
    (tmp_path / "map.json").write_text(json.dumps(ids))
    assert load_token_map(tmp_path / "map.npy") == load_token_map(str(tmp_path / "map.json")) == (5, 0, 9)
    (tmp_path / "bad.json").write_text("[1, 1]")
    with pytest.raises(ConfigError, match="twice"):
        load_token_map(tmp_path / "bad.json")
    (tmp_path / "nested.json").write_text("[[1, 2]]")
    with pytest.raises(ConfigError, match="flat list"):
        load_token_map(tmp_path / "nested.json")
    with pytest.raises(ConfigError, match="no such file"):
        load_token_map(tmp_path / "none.json")


@pytest.mark.parametrize(
    "name, content",
    [
        ("cut.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran"),
        ("empty.npy", b""),
        ("text.npy", b"1, 2, 3"),
        ("cut.json", b"[1, 2"),
        ("latin.json", b"[\xe9]"),
        ("deep.json", b"[" * 100_000),
        ("ragged.json", b"[[1], 2]"),
        ("names.json", b'{"a": 1}'),
        ("empty.pt", b""),
        ("text.pt", b"ids"),
    ],
)
def test_a_damaged_token_map_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_token_map(tmp_path / name)


def test_token_maps_are_read_from_torch_files(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save([5, 0, 9], tmp_path / "list.pt")
    torch.save(torch.tensor([7, 5, 0, 9])[1:], tmp_path / "tensor.pt")
    assert load_token_map(tmp_path / "list.pt") == load_token_map(tmp_path / "tensor.pt") == (5, 0, 9)


def test_a_wide_window_changes_nothing_and_a_sink_extends_a_narrow_one():
    target, head = tiny_target(), random_head("eagle3")
    spec = SpecConfig(num_steps=3, topk=3, num_draft_tokens=10)
    ids = prompts(24, (19, 30))
    trees = {}
    for name, over in {
        "none": {},
        "wide": {"draft_window_size": 64},
        "narrow": {"draft_window_size": 4},
        "sink": {"draft_window_size": 4, "draft_sink_size": 26},
    }.items():
        trees[name], _ = proposed(target, head, dataclasses.replace(spec, options=over), ids)
    np.testing.assert_array_equal(trees["wide"].tokens, trees["none"].tokens)
    assert (trees["narrow"].tokens != trees["none"].tokens).any()
    # The sink and the window together cover all of the first prompt and its tree, not of the second.
    np.testing.assert_array_equal(trees["sink"].tokens[0], trees["none"].tokens[0])


def test_parameters_follow_the_family_and_are_checked():
    llama, qwen = tiny_target().config, dataclasses.replace(tiny_target().config, family="qwen3")
    resolved = {c.family: registry.resolve("EAGLE", SpecConfig(), c) for c in (llama, qwen)}
    assert {f: (s.num_steps, s.topk, s.num_draft_tokens) for f, s in resolved.items()} == {
        "llama": (5, 4, 8),
        "qwen3": (3, 1, 4),
    }
    chain = registry.resolve("EAGLE", SpecConfig(use_rejection_sampling=True), llama)
    assert (chain.num_steps, chain.topk, chain.num_draft_tokens) == (3, 1, 4)
    with pytest.raises(ConfigError, match="use_block_verification checks chains only: topk=4"):
        registry.resolve("EAGLE", SpecConfig(5, 4, 8, use_block_verification=True), llama)
    with pytest.raises(ConfigError, match="num_draft_tokens=50 is out of range.*2 to 37 nodes"):
        registry.resolve("EAGLE", SpecConfig(3, 4, 50), llama)
    assert registry.resolve("EAGLE", SpecConfig(3, 4, 37), llama).num_draft_tokens == 37
    with pytest.raises(ConfigError, match="num_steps=4 contradicts the static tree, which has num_steps=2"):
        registry.resolve("EAGLE", spec_of(num_steps=4, static_tree="0 1 00"), llama)
    with pytest.raises(ConfigError, match=r"\(1, 0\) is empty, negative, named twice or has no parent"):
        registry.resolve("EAGLE", spec_of(static_tree="0 10"), llama)
    with pytest.raises(ConfigError, match="topk=2 must be 1"):
        registry.resolve("PEAGLE", SpecConfig(3, 2, 4), llama)
    assert registry.resolve("PEAGLE", SpecConfig(), llama).num_steps == 5


def test_a_head_for_another_target_is_refused():
    head = random_head("eagle3")
    for other, message in (
        (tiny_target(vocab=30), "vocabulary of 24 tokens, the target has 30"),
        (tiny_target(hidden_size=32), "target of hidden size 16, this one has 32"),
        (tiny_target(num_layers=1), r"reads hidden states \(0, 1, 2\), but the target has 1 layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate(other, [[1]], draft=head, max_new_tokens=2)


def test_caches_are_updated_in_place():
    target = tiny_target()
    batch = batch_for(
        target, prompts(24)[:2], draft=random_head("eagle3"), spec=SpecConfig(3, 3, 8), max_new_tokens=200, page_size=64
    )
    assert_caches_are_updated_in_place(batch)


def test_one_program_for_each_batch_and_tree(monkeypatch):
    traces = count_traces(monkeypatch)
    target, head = tiny_target(), random_head("eagle", seed=5)
    for seed in range(3):
        ids = prompts(24, (3, 7), seed=seed)
        generate(target, ids, draft=head, spec=SpecConfig(2, 1, 3), max_new_tokens=6, prefill_chunk=8)
    assert traces["rounds"] == [2]
    generate(target, prompts(24)[:1], draft=head, spec=SpecConfig(2, 1, 3), max_new_tokens=6, prefill_chunk=8)
    assert traces["rounds"] == [2, 1]
    assert len(set(traces["prefill"])) == len(traces["prefill"])


def test_nan_in_free_slots_and_scratch_reaches_nothing():
    target, head = tiny_target(), random_head("speculators")
    options = dict(draft=head, spec=SpecConfig(3, 3, 8), page_size=4, prefill_chunk=4)
    clean, poisoned = (batch_for(target, prompts(24)[:3], **options) for _ in range(2))

    def poison(state):
        pages, size = state.cache.layers[0].k.shape[:2]
        keep = np.zeros((pages, size), bool)
        for row, n in zip(*jax.device_get((state.cache.page_table, state.cache.length)), strict=True):
            slots = np.arange(n)
            keep[row[slots // size], slots % size] = True
        mask = jnp.asarray(keep)[..., None, None]

        def layer(x):
            return LayerKV(*(jnp.where(mask, pool, jnp.nan) for pool in x)) if isinstance(x, LayerKV) else x

        return jax.tree.map(layer, state, is_leaf=lambda x: isinstance(x, LayerKV))

    clean.prefill()
    clean.run()
    poisoned.state = poison(poisoned.state)
    poisoned.prefill()
    while not bool(poisoned.state.done.all()):
        poisoned.state = poison(poisoned.state)
        poisoned.run(1)
    np.testing.assert_array_equal(poisoned.state.tokens, clean.state.tokens)
    np.testing.assert_array_equal(poisoned.state.round_of, clean.state.round_of)


def test_a_sampled_chain_carries_the_distribution_it_was_drawn_from():
    """Greedy rows propose the argmax with q one-hot; sampled ones follow softmax(logits / temperature), scattered to V."""
    rows, vocab, ids = 600, 7, jnp.array([1, 2, 4, 6])
    logits = jnp.array([0.5, 2.0, -1.0, 1.0])
    settings = [SamplingParams(temperature=0.0 if i % 3 == 0 else 0.7, top_k=2) for i in range(rows)]
    sampling = sampling_state(settings, vocab, [[]] * rows, [True] * rows)
    tree, seen = sampled_chain(
        jnp.zeros(rows, jnp.int32),
        jnp.broadcast_to(logits, (rows, 4)),
        lambda level, token, aux: (jnp.broadcast_to(-logits, (rows, 4)), [*aux, token]),
        [],
        row_keys(range(rows)),
        sampling,
        num_steps=2,
        vocab_size=vocab,
        target_ids=ids,
    )
    assert tree.is_chain
    assert [t.shape for t in seen] == [(rows,)]
    greedy = np.arange(rows) % 3 == 0
    assert (np.asarray(tree.tokens)[greedy, 1:] == [2, 4]).all()
    for node, scores in ((1, logits), (2, -logits)):
        q = jax.nn.softmax(scores / 0.7)
        expected = np.zeros(vocab)
        expected[np.asarray(ids)] = q
        np.testing.assert_allclose(tree.draft_probs[1, node], expected, rtol=1e-5)
        assert tree.draft_probs[0, node].tolist() == np.eye(vocab)[int(ids[jnp.argmax(scores)])].tolist()
        drawn = np.asarray(tree.tokens)[~greedy, node].tolist()
        assert p_value(drawn, ids.tolist(), q.tolist()) > 1e-3
    first, second = np.asarray(tree.tokens)[~greedy, 1:].T
    same = [np.mean(second[first == i] == 4) for i in (2, 6)]
    assert abs(same[0] - same[1]) < 0.2  # the two draws of a row are independent
