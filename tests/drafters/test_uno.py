"""UNO's parts: the gate, the exact token, noise, stops, grammars, parameters, caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, ModelParams, SpecConfig, generate
from jaxspec.conversion.drafts.peft import columns_of
from jaxspec.drafters import registry
from jaxspec.drafters.uno import drafter as uno
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import MODULES, PRODUCTS, UnoConfig
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.kvcache import LayerKV
from jaxspec.models import decoder
from jaxspec.models.layers import dense
from jaxspec.models.paged import paged_forward
from jaxspec.round import context, draft, verify
from jaxspec.sampling import MAX_STOP_IDS, SamplingParams, row_keys
from jaxspec.trees.tree import pack_bits
from tests.drafters.batch_checks import assert_caches_are_updated_in_place
from tests.drafters.eagle_cases import prompts, tiny_target
from tests.drafters.uno_cases import VOCAB, random_adapter, target, without_effect
from tests.specs import spec_of


def batch_for(model, asked, adapter, spec=None, sampling=None, new=16, page_size=4) -> Batch:
    algorithm = "NONE" if adapter is None else "UNO"
    spec = spec or (SpecConfig() if adapter is None else SpecConfig(num_draft_tokens=4))
    return open_batch(
        model,
        asked,
        draft=adapter,
        algorithm=algorithm,
        spec=spec,
        sampling=sampling or SamplingParams(seed=0),
        max_new_tokens=new,
        page_size=page_size,
        prefill_chunk=16,
    )


def answers_of(batch) -> list[list[int]]:
    batch.prefill()
    batch.run()
    return [log.tokens for log in batch.logs()]


def draft_passes(adapter, dtype=jnp.float32):
    """(logits, pools) of a draft pass and of the same rows on the target's own weights, in programs of one shape."""
    model = target()
    tree = jax.tree.map(lambda x: x.astype(dtype), model.tree)
    batch = batch_for(ModelParams(tree, model.config), prompts(VOCAB), adapter)
    batch.prefill()
    program, state = batch.program, batch.state
    noise = jnp.arange(12, dtype=jnp.int32).reshape(4, 3) % VOCAB

    @jax.jit
    def with_adapter(params):
        return program.drafter.run(params, context(program, tree, state, ~state.done), noise)

    @jax.jit
    def plain():
        config, base = model.config, state.cache.length
        tokens = jnp.concatenate([state.bonus[:, None], noise], 1)
        out = paged_forward(
            tree,
            config,
            decoder.embed(tree, config, tokens),
            state.cache.layers,
            state.cache.page_table,
            base,
            base[:, None] + jnp.arange(4),
            jnp.ones(tokens.shape, bool),
        )
        return decoder.unembed(tree, config, out.hidden, exact=True), out.layers

    return with_adapter(adapter.tree), plain(), state.cache


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("poison", [False, True])
def test_the_first_row_is_bit_identical_to_plain_decoding(dtype, poison):
    adapter = random_adapter()
    if poison:
        adapter = type(adapter)(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), adapter.tree), adapter.config)
    (logits, layers), (plain, plain_layers), cache = draft_passes(adapter, dtype)
    np.testing.assert_array_equal(logits[:, 0], plain[:, 0])
    assert bool(jnp.isfinite(plain).all())
    assert not np.array_equal(logits[:, 1], plain[:, 1])
    page = jnp.take_along_axis(cache.page_table, cache.length[:, None] // 4, 1)[:, 0]
    for ours, theirs in zip(layers, plain_layers, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(x[page, cache.length % 4], y[page, cache.length % 4])


def test_an_adapter_without_effect_changes_nothing():
    (logits, layers), (plain, plain_layers), _ = draft_passes(without_effect(random_adapter()))
    np.testing.assert_array_equal(logits, plain)
    jax.tree.map(np.testing.assert_array_equal, layers, plain_layers)


@pytest.mark.parametrize("kernel", ["array", "int8"])
def test_dense_adds_the_update_to_every_kind_of_layer(kernel):
    keys = jax.random.split(jax.random.key(0), 5)
    x, w, a, b = (jax.random.normal(k, s) for k, s in zip(keys, [(2, 3, 5), (5, 7), (5, 2), (2, 7)], strict=False))
    layer = {"kernel": w, "bias": jax.random.normal(keys[4], (7,))}
    if kernel == "int8":
        layer["kernel"] = {"q": jnp.round(w * 30).astype(jnp.int8), "scale": jnp.full(7, 1 / 30)}
    gate = jnp.array([[[False], [True], [True]], [[True], [False], [False]]])
    got = dense(x, {**layer, "lora": {"a": a, "b": b, "scale": 1.5, "gate": gate}})
    np.testing.assert_allclose(got, dense(x, layer) + gate * 1.5 * (x @ a @ b), rtol=1e-5, atol=1e-5)


def test_the_tree_of_the_target_is_neither_copied_nor_changed():
    tree, adapter = target().tree, random_adapter()
    before = jax.tree.structure(tree)
    made = uno_model.adapted(tree, adapter.tree, 0.5, jnp.ones((1, 2, 1), bool))
    assert jax.tree.structure(tree) == before
    assert made["layers"]["0"]["mlp"]["down"]["kernel"] is tree["layers"]["0"]["mlp"]["down"]["kernel"]
    adapted = {(b, n) for b in ("attention", "mlp") for n, p in made["layers"]["0"][b].items() if "lora" in p}
    assert adapted == {("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down")}


def test_the_exact_token_is_the_one_that_plain_sampling_draws():
    """Prefill's token and the exact token of the first round come from the random numbers of plain decoding."""
    options = dict(temperature=5.0, top_p=0.95, min_p=0.02, max_new_tokens=2, seed=list(range(64)), ignore_eos=True)
    asked = [[1, 4, 2]] * 64
    got = generate(target(), asked, draft=random_adapter(), **options)
    expected = generate(target(), asked, algorithm="none", **options)
    assert [a.tokens for a in got] == [a.tokens for a in expected]
    assert len({tuple(a.tokens) for a in got}) > 8


@pytest.mark.parametrize("tree", [{}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}])
def test_bias_and_least_length_pass_the_one_pipeline(tree):
    model = dataclasses.replace(target().config, stop_token_ids=(3,))
    model, asked = ModelParams(target().tree, model), prompts(VOCAB, (5, 9))
    sampling = SamplingParams(temperature=0.0, logit_bias={3: 4.0, 5: 2.0}, min_new_tokens=7, frequency_penalty=0.3)
    got = batch_for(model, asked, random_adapter(), SpecConfig(**tree), sampling)
    plain = batch_for(model, asked, None, SpecConfig(), sampling)
    for batch in (got, plain):
        np.testing.assert_array_equal(batch.state.sampling.stop_ids[:, 0], 3)
    answers = answers_of(got)
    assert answers == answers_of(plain)
    assert all(len(a) >= 7 for a in answers)


def test_a_grammar_holds_for_the_exact_token_too():
    """Even and odd tokens must alternate: the exact token's mask is known before drafting, a node's before it is verified."""
    model, words = target(), {}
    for parity in (0, 1):
        words[parity] = np.asarray(pack_bits(jnp.arange(VOCAB) % 2 == parity))

    def masks(tokens):
        return jnp.asarray(np.stack([[words[1 - int(t) % 2] for t in row] for row in np.asarray(tokens)]))

    outputs = []
    for adapter in (random_adapter(), None):
        batch = batch_for(model, prompts(VOCAB), adapter, new=24)
        batch.prefill()
        program, state, steps = (
            batch.program,
            batch.state,
            (jax.jit(draft, static_argnums=0), jax.jit(verify, static_argnums=0)),
        )
        while not bool(state.done.all()):
            state, tree = steps[0](program, model.tree, batch.draft_tree, state, masks(state.bonus[:, None])[:, 0])
            state = steps[1](program, model.tree, batch.draft_tree, state, tree, masks(tree.tokens))
        outputs.append([row[n : n + 24].tolist() for row, n in zip(np.asarray(state.tokens), state.prompt_length, strict=True)])
    assert outputs[0] == outputs[1]
    assert all((np.diff(row) % 2 == 1).all() for row in outputs[0])
    assert int(state.rounds.sum()) == 4 * 23


@pytest.mark.parametrize("tree", [{"num_draft_tokens": 4}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}])
def test_every_stop_position_and_length_limit_inside_a_run(tree):
    """Stops at the exact token, at a draft, at the bonus token, limits on each side: as in plain decoding."""
    model, adapter, prompt = target(), random_adapter(seed=3), [6, 3, 3, 7, 6]
    full = generate(model, prompt, algorithm="none", max_new_tokens=14, ignore_eos=True).tokens
    firsts = [t for i, t in enumerate(full) if t not in full[:i]]
    cases = [(stop, limit) for limit in range(1, 15) for stop in (*firsts, -1)]
    batch = batch_for(model, [prompt] * len(cases), adapter, SpecConfig(**tree), new=14)
    stops, limits = (jnp.asarray(c, jnp.int32) for c in zip(*cases, strict=True))
    stop_ids = jnp.full((len(cases), MAX_STOP_IDS), -1, jnp.int32).at[:, 0].set(stops)
    batch.state = dataclasses.replace(
        batch.state,
        limit=len(prompt) + limits,
        keys=row_keys(range(len(cases))),
        sampling=dataclasses.replace(batch.state.sampling, stop_ids=stop_ids),
    )
    batch.prefill()
    batch.run()
    ends = set()
    for (stop, limit), answer, length in zip(cases, batch.logs(), batch.state.cache.length, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full) + 1
        assert answer.tokens == full[: min(end, limit)]
        assert answer.finish_reason == ("stop" if end <= limit else "length")
        assert int(length) == len(prompt) + len(answer.tokens) - 1
        in_last = int((answer.round_of == answer.round_of[-1]).sum())
        ends.add(
            "prefill"
            if answer.round_of[-1] == 0
            else "exact"
            if in_last == 1
            else "draft"
            if answer.from_draft[-1]
            else "bonus"
        )
    assert ends == {"prefill", "exact", "draft", "bonus"}


def noise_of(model, asked, seed=0, **spec) -> np.ndarray:
    batch = batch_for(model, asked, random_adapter(), spec_of(num_draft_tokens=5, **spec))
    cache = dataclasses.replace(batch.state.cache, length=jnp.array([len(a) - 1 for a in asked], jnp.int32))
    keys = row_keys([seed + i % 8 for i in range(len(asked))])
    state = dataclasses.replace(batch.state, cache=cache, keys=keys)
    return np.asarray(batch.program.drafter.noise_ids(context(batch.program, model.tree, state, ~state.done)))


def test_noise_is_reproducible_and_stays_in_its_range():
    model, asked = target(), [[1, 4, 2, int(i)] for i in range(8)] * 4
    uniform = noise_of(model, asked, seed=3)
    assert uniform.shape == (32, 4)
    assert set(uniform.ravel()) == set(range(1, VOCAB))
    np.testing.assert_array_equal(uniform, noise_of(model, asked, seed=3))
    np.testing.assert_array_equal(uniform[1:8], noise_of(model, asked, seed=4)[:7])  # a function of seed and length
    assert len({tuple(row) for row in uniform[:8]}) == 8
    assert noise_of(model, asked, uno_mask_token_id=5).max() == 4

    hashed = noise_of(model, asked, uno_noise="hash")
    np.testing.assert_array_equal(hashed, noise_of(model, asked, seed=9, uno_noise="hash"))
    np.testing.assert_array_equal(hashed[:8], hashed[8:16])  # a function of the text alone
    assert len({tuple(row) for row in hashed[:8]}) == 8
    assert (noise_of(model, asked, uno_noise="mask", uno_mask_token_id=6) == 6).all()


RESOLVED = {
    "default": ({}, (1, 1, 8)),
    "linear": (dict(num_steps=1, topk=1, num_draft_tokens=6), (1, 1, 6)),
    "linear by drafts": (dict(num_steps=5, topk=1, num_draft_tokens=6), (1, 1, 6)),
    "linear by steps alone": (dict(num_steps=3), (1, 1, 4)),
    "tree": (dict(num_steps=15, topk=4, num_draft_tokens=32), (15, 4, 32)),
    "tree by width alone": (dict(topk=4), (15, 4, 32)),
    "small tree": (dict(num_steps=2, topk=2), (2, 2, 7)),
    "more nodes than SGLang's": (dict(num_steps=15, topk=8, num_draft_tokens=512), (15, 8, 512)),
    "all nodes": (dict(num_steps=1, topk=4, num_draft_tokens=5), (1, 4, 5)),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_parameters_are_filled_in(name):
    asked, expected = RESOLVED[name]
    spec = registry.resolve("UNO", spec_of(**asked), target().config, random_adapter())
    assert (spec.num_steps, spec.topk, spec.num_draft_tokens) == expected
    drafter, _ = uno.build(target(), random_adapter(), spec)
    steps, topk, nodes = expected
    assert drafter.block_size == (nodes if topk == 1 else steps + 1)
    assert drafter.slack == max(nodes + 1, drafter.block_size)
    assert drafter.max_accept == (nodes + 1 if topk == 1 else min(steps, nodes - 1) + 2)


WRONG = {
    "one node": (dict(num_draft_tokens=1), "num_draft_tokens=1 must be at least 2"),
    "steps and nodes": (dict(num_steps=2, num_draft_tokens=8), "num_steps=2 disagrees with num_draft_tokens=8"),
    "too many nodes": (dict(num_steps=2, topk=2, num_draft_tokens=8), "num_draft_tokens=8 is out of range: .* 2 to 7 nodes"),
    "topk": (dict(topk=9), "topk=9 exceeds the vocabulary of 8"),
    "rejection of a tree": (dict(topk=2, use_rejection_sampling=True), "use_rejection_sampling checks chains only: topk=2"),
    "window": (dict(draft_window_size=4), "draft_window_size=4 is not an option of algorithm='uno'"),
    "static tree": (dict(static_tree="0 1"), "static_tree='0 1' is not an option of algorithm='uno'"),
    "survival": (dict(min_draft_survival=0.5), "min_draft_survival=0.5 is not an option of algorithm='uno'"),
    "noise": (dict(uno_noise="pink"), "uno_noise='pink' must be one of uniform, hash, mask"),
    "no mask token": (dict(uno_noise="mask"), "needs uno_mask_token_id"),
    "mask token": (dict(uno_mask_token_id=8), r"uno_mask_token_id=8 must lie in 2 … 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_parameters_that_cannot_work_are_refused(name):
    asked, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        registry.resolve("UNO", spec_of(**asked), target().config, random_adapter())


def test_an_adapter_for_another_target_is_refused():
    with pytest.raises(ConfigError, match="made for a target with num_layers=1, this one has 2"):
        generate(tiny_target(vocab=VOCAB), [[1, 2]], draft=random_adapter())
    with pytest.raises(ConfigError, match="can change .* changes fc1"):
        UnoConfig(target=target().config, rank=2, alpha=4.0, modules=("fc1",))


def test_auto_takes_the_adapter_that_came_with_the_target():
    model = ModelParams(target().tree, target().config, drafts={"uno": random_adapter()})
    stats = generate(model, [1, 4, 2], max_new_tokens=8, ignore_eos=True).stats
    assert (stats.algorithm, stats.num_steps, stats.topk, stats.num_draft_tokens) == ("UNO", 1, 1, 8)
    assert f"{stats.tokens_per_pass:.2f} tokens a pass of the target" in str(stats)


def test_nan_behind_the_committed_positions_reaches_nothing_and_caches_stay_in_place():
    tree = {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}
    model, asked = target(), prompts(VOCAB)
    expected = answers_of(batch_for(model, asked, random_adapter(), SpecConfig(**tree)))
    batch = batch_for(model, asked, random_adapter(), SpecConfig(**tree))
    batch.prefill()
    while not bool(batch.state.done.all()):
        table, length = jax.device_get((batch.state.cache.page_table, batch.state.cache.length))
        keep = np.zeros(batch.state.cache.layers[0].k.shape[:2], bool)
        for row, n in zip(table, length, strict=True):
            keep[row[np.arange(n) // 4], np.arange(n) % 4] = True
        layers = tuple(
            LayerKV(*(jnp.where(keep[..., None, None], x, jnp.nan) for x in layer)) for layer in batch.state.cache.layers
        )
        cache = dataclasses.replace(batch.state.cache, layers=layers)
        batch.state = dataclasses.replace(batch.state, cache=cache)
        batch.run(1)
    assert [log.tokens for log in batch.logs()] == expected
    assert_caches_are_updated_in_place(batch)


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "v_proj", "up_proj")])
def test_blocks_name_what_may_differ_from_zero(modules):
    config = dataclasses.replace(random_adapter().config, modules=modules)
    for product in PRODUCTS:
        found, changed = uno_model.blocks_of_columns(config, product), config.changed(product)
        if len(changed) < 2:
            assert found is None
            continue
        names, _, _, split = columns_of(config, product)
        for module, columns in zip(names, split(np.arange(found.size)[None]), strict=True):
            assert set(found[columns.ravel()]) == {changed.index(module) if module in changed else -1}
