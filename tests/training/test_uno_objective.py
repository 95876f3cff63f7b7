"""UNO's loss against numpy, its curriculum, and what training with it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, SpecConfig, generate
from jaxspec.conversion.drafts.peft import rules_of
from jaxspec.drafters.uno import model as uno_model
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.training import uno
from jaxspec.training.blocks import sample_anchors
from tests import tiny
from tests.training.block_cases import double, greedy_text, greedy_view, random_view, shaken, softmax, train
from tests.training.numpy_model import rms, rotated

KEY = jax.random.key(7)


def start(model, objective):
    params, constants = objective.init(jax.random.key(0), model.tree, jnp.ones(model.config.vocab_size, jnp.int32))
    assert not constants
    return params


def modules(config, adapter):
    """Per layer the matrices of all modules under Hugging Face names, scaled: {name: (A [r, in], B [out, r])}."""
    found = []
    for i in range(config.target.num_layers):
        layer = {}
        for rule in rules_of(config):
            _, index, block, product, leaf = rule.target.split("/")
            if int(index) == i:
                parts = rule.transform.split(np.asarray(adapter["layers"][index][block][product][leaf], np.float64))
                for source, part in zip(rule.sources, parts, strict=True):
                    layer.setdefault(source.split(".")[-3], {})[leaf] = part
        found.append({name: (m["a"], m["b"] * config.scale) for name, m in layer.items()})
    return found


def split_target(c, layer):
    """A target layer's kernels under Hugging Face names, [in, out]."""
    K, G, D = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
    qkv = layer["attention"]["qkv"]["kernel"].reshape(-1, K, G + 2, D)
    gate, up = np.split(layer["mlp"]["gate_up"]["kernel"], 2, -1)
    return {
        "q_proj": qkv[:, :, :G].reshape(-1, K * G * D),
        "k_proj": qkv[:, :, G].reshape(-1, K * D),
        "v_proj": qkv[:, :, G + 1].reshape(-1, K * D),
        "o_proj": layer["attention"]["out"]["kernel"],
        "gate_proj": gate,
        "up_proj": up,
        "down_proj": layer["mlp"]["down"]["kernel"],
    }


def one_pass(c, tree, loras, tokens, noisy: int):
    """Logits of all rows of a causal pass over `tokens` whose last `noisy` rows run with the adapter."""
    T = len(tokens)
    gate = (np.arange(T) >= T - noisy)[:, None]
    x = tree["embedder"]["embedding"][tokens]
    for i in range(c.num_layers):
        p = tree["layers"][str(i)]
        kernels = split_target(c, p)

        def product(rows, name, kernels=kernels, lora=loras[i]):
            a, b = lora[name]
            return rows @ kernels[name] + gate * (rows @ a.T @ b.T)

        z = rms(x, p["input_norm"]["scale"], c.norm_eps)
        q, k, v = (product(z, n).reshape(T, -1, c.head_dim) for n in ("q_proj", "k_proj", "v_proj"))
        q, k = (np.array([[rotated(h, t) for h in row] for t, row in enumerate(y)]) for y in (q, k))
        out = np.zeros_like(q)
        for t in range(T):
            for h in range(c.num_heads):
                kv = h // (c.num_heads // c.num_kv_heads)
                out[t, h] = softmax(k[: t + 1, kv] @ q[t, h] * c.head_dim**-0.5) @ v[: t + 1, kv]
        x = x + product(out.reshape(T, -1), "o_proj")
        z = rms(x, p["mlp_norm"]["scale"], c.norm_eps)
        gated = product(z, "gate_proj")
        x = x + product(gated / (1 + np.exp(-gated)) * product(z, "up_proj"), "down_proj")
    return rms(x, tree["final_norm"]["scale"], c.norm_eps) @ tree["head"]["kernel"]


def restated(objective, params, view, key, size):
    """(loss, accept) of blocks of `size` rows: every block as its own pass, as the drafter runs it."""
    c, A, M = objective.target, objective.anchors, objective.block - 1
    tokens, supervised = np.asarray(view.tokens), np.asarray(view.supervised)
    B, T = tokens.shape
    seed_key, noise_key = jax.random.split(key)
    allowed = np.zeros((B, T), bool)
    allowed[:, :-2] = supervised[:, :-2] & supervised[:, 1:-1] & supervised[:, 2:]
    seeds, kept = map(np.asarray, sample_anchors(seed_key, jnp.asarray(allowed), A * M))
    noise = np.asarray(jax.random.randint(noise_key, (B, A * M), 1, objective.noise_below)).reshape(B, A, M)
    loras, tree = modules(objective.config, objective.adapter(params)), double(view.tree)
    total = rows = blocks = 0
    accepted = np.zeros(M)
    per = M // (size - 1)
    for b in range(B):
        clean = softmax(one_pass(c, tree, loras, tokens[b], 0))
        for a in range(A):
            for i in range(per):
                s = seeds[b, a * per + i]
                if not kept[b, a * per + i]:
                    continue
                own = noise[b, a, i * (size - 1) : (i + 1) * (size - 1)]
                student = softmax(one_pass(c, tree, loras, np.concatenate([tokens[b, : s + 1], own]), len(own)))[s + 1 :]
                matches = []
                for o in range(size - 1):
                    if s + 2 + o >= T or not supervised[b, s + 2 + o]:
                        break
                    total, rows = total + np.abs(student[o] - clean[s + 1 + o]).sum(), rows + 1
                    matches.append(student[o].argmax() == clean[s + 1 + o].argmax())
                if len(matches) == size - 1:
                    accepted[: size - 1] += np.cumprod(matches)
                    blocks += 1
    return total / rows, accepted / max(blocks, 1)


@pytest.mark.parametrize("step, size", [(0, 2), (4, 4), (11, 5)])
def test_loss_equals_numpy_at_every_stage(step, size):
    model = tiny.target(layers=2)
    objective = uno.build(model.config, rank=2, block=5, anchors=2, curriculum_steps=12, noise_below=40)
    params, view = shaken(start(model, objective)), random_view(model, objective)
    loss, metrics = jax.jit(objective.loss)(params, view, KEY, jnp.int32(step))
    expected, accept = restated(objective, params, view, KEY, size)
    assert float(metrics["block"]) == size
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_allclose(metrics["accept"], accept, atol=1e-6)


def test_block_sizes_grow_in_equal_parts():
    objective = uno.build(tiny.config(), block=16, curriculum_steps=60)
    sizes = [int(objective.block_size(jnp.int32(step))) for step in (0, 9, 10, 29, 30, 59, 1 << 30)]
    assert sizes == [2, 2, 4, 6, 8, 16, 16]
    assert int(uno.build(tiny.config(), block=3).block_size(jnp.int32(0))) == 3


def test_rows_of_a_module_stay_in_its_columns():
    """What training does not touch would be lost in PEFT's files, so the loss must not depend on it."""
    model = tiny.target(layers=2)
    objective = uno.build(model.config, rank=2, block=3, anchors=2)
    params = start(model, objective)
    assert jax.tree.map(lambda x: x.shape, params) == uno_model.param_shapes(objective.config)
    view = random_view(model, objective)
    gradient = jax.jit(jax.grad(lambda p: objective.loss(p, view, KEY, jnp.int32(0))[0]))(shaken(params))
    masks = uno.own_columns(objective.config)["layers"]["1"]
    for block, product in uno.PRODUCTS:
        b = np.asarray(gradient["layers"]["1"][block][product]["b"])
        mask = masks[block][product]["b"]
        assert b.shape == mask.shape
        assert np.all(b[mask == 0] == 0)
        assert np.all(np.abs(b).max(1) > 0)
        assert np.abs(gradient["layers"]["1"][block][product]["a"]).max() > 0
    share = {p: masks[b][p]["b"].mean() for b, p in uno.PRODUCTS}
    assert share == {"qkv": pytest.approx(1 / 3), "out": 1.0, "gate_up": 0.5, "down": 1.0}


def test_a_fresh_adapter_changes_nothing():
    model = tiny.target(layers=2)
    objective = uno.build(model.config, rank=2)
    assert all(not np.any(b) for path, b in jax.tree_util.tree_leaves_with_path(start(model, objective)) if path[-1].key == "b")


@pytest.mark.parametrize(
    "changes",
    [
        dict(qk_norm=True, windows=(4, None)),
        dict(norm_plus_one=True, sandwich_norms=True, windows=(5, 5), attention_softcap=5.0, embedding_scale=3.0),
    ],
)
def test_layers_one_by_one_and_in_a_loop(changes):
    """The clean keys and values are those of the decoder, in targets whose layers differ as in those whose layers are alike."""
    model = tiny.target(**changes)
    objective = uno.build(model.config, rank=2, block=4, anchors=3)
    view = random_view(model, objective)

    def record(cache, q, k, v, **options):
        out, _ = causal_attend(jnp.broadcast_to(jnp.arange(14), (2, 14)))(cache, q, k, v, **options)
        return out, (k, v)

    x = decoder.embed(model.tree, model.config, view.tokens)
    expected = decoder.decode(model.tree, model.config, x, jnp.broadcast_to(jnp.arange(14), (2, 14)), record, (None, None))
    for found, part in zip(jax.jit(objective.clean_entries)(view), zip(*expected.layers, strict=True), strict=True):
        np.testing.assert_allclose(found, jnp.stack(part), atol=2e-5)
    both = jax.jit(jax.value_and_grad(lambda p: objective.loss(p, view, KEY, jnp.int32(0))[0]))
    loss, gradient = both(start(model, objective))
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_training_makes_drafts_that_the_target_accepts():
    model, asked, rows = greedy_text()
    objective = uno.build(model.config, rank=4, block=4, anchors=8, curriculum_steps=90, noise_below=2)
    draft, seen = train(objective, model, greedy_view(objective), 120, 1e-2)
    losses = [loss for loss, _ in seen]
    assert np.mean(losses[25:30]) < 0.9 * losses[0]
    simulated = 2 + np.mean([metrics["accept"].sum() for _, metrics in seen[-10:]])
    assert simulated > 2.3
    for spec in (SpecConfig(num_draft_tokens=4), SpecConfig(num_steps=3, topk=3, num_draft_tokens=8)):
        answers = generate(model, asked, draft=draft, spec=spec, max_new_tokens=40, ignore_eos=True)
        assert [a.tokens for a in answers] == [row[8:48] for row in rows]
        np.testing.assert_allclose(np.mean([a.stats.accept_length for a in answers]), simulated, atol=0.7)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(block=1), "block=1 must be at least 2"),
        (dict(anchors=0), "anchors=0"),
        (dict(rank=0), "rank r=0"),
        (dict(noise_below=1), "noise_below=1 must lie in 2"),
        (dict(ce=-1.0), "ce=-1.0"),
    ],
)
def test_impossible_options(options, said):
    with pytest.raises(ConfigError, match=said):
        uno.build(tiny.config(), **options)
