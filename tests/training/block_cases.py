"""What the tests of the block objectives share: a numpy restatement of a block draft, short training, greedy text."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec import DraftParams, ModelParams, generate
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.training.objective import View, merge
from tests.drafters.eagle_cases import tiny_target
from tests.training.numpy_model import rms, rotated


def view_of(target: ModelParams, objective, tokens, supervised) -> View:
    """A batch as the loop makes it."""
    config, tokens = target.config, jnp.asarray(tokens, jnp.int32)
    out = states(target.tree, tokens, config, tuple(objective.taps))
    features = jnp.zeros((*tokens.shape, 0)) if out.features is None else out.features
    return View(target.tree, tokens, jnp.asarray(supervised), features, out.hidden)


@partial(jax.jit, static_argnums=(2, 3))
def states(tree, tokens, config, taps) -> decoder.Output:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(tree, config, tokens)
    return decoder.decode(tree, config, x, positions, causal_attend(positions), (None,) * config.num_layers, taps)


def random_view(target: ModelParams, objective, rows: int = 2, length: int = 14) -> View:
    rng = np.random.default_rng(0)
    supervised = rng.random((rows, length)) < 0.8
    return view_of(target, objective, rng.integers(0, target.config.vocab_size, (rows, length)), supervised)


def shaken(tree, seed: int = 3):
    """Every parameter moved at random, so that none that should matter is still zero."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def train(objective, target: ModelParams, view: View, steps: int, rate: float):
    """(the draft, loss and metrics of every step) after some steps of Adam on one batch."""
    params, constants = objective.init(jax.random.key(0), target.tree, jnp.ones(target.config.vocab_size, jnp.int32))
    optimiser = optax.adam(rate)

    @jax.jit
    def update(params, state, step):
        def loss(trainable):
            return objective.loss(merge(trainable, constants), view, jax.random.fold_in(jax.random.key(1), step), step)

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, change), state, value, metrics

    state, seen = optimiser.init(params), []
    for step in range(steps):
        params, state, value, metrics = update(params, state, jnp.int32(step))
        seen.append((float(value), jax.tree.map(np.asarray, metrics)))
    return DraftParams(merge(params, constants), objective.config), seen


TEXT = 56


@cache
def greedy_text() -> tuple[ModelParams, list[list[int]], list[list[int]]]:
    """(target, prompts, rows of a prompt and its greedy answer)."""
    target = tiny_target(vocab=16, num_layers=2, seed=2)
    asked = np.random.default_rng(5).integers(0, 16, (6, 8)).tolist()
    answers = generate(target, asked, algorithm="none", max_new_tokens=TEXT - 8, ignore_eos=True)
    return target, asked, [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]


def greedy_view(objective) -> View:
    """The greedy text as a batch: all behind the prompts is supervised."""
    target, asked, rows = greedy_text()
    return view_of(target, objective, rows, np.broadcast_to(np.arange(TEXT) >= len(asked[0]), (len(rows), TEXT)))


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def block_outputs(params, config, target_tree, features, token: int, anchor: int):
    """Outputs of all slots [M, E] of one block behind `anchor`, slot by slot and head by head."""
    c, M = config.layers, config.block_size
    K, G, D, eps = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim, c.norm_eps
    context = rms(features[:anchor] @ params["fc"]["kernel"], params["context_norm"]["scale"], eps)
    x = target_tree["embedder"]["embedding"][[token] + [config.mask_token_id] * (M - 1)] * config.embedding_scale
    for layer in range(c.num_layers):
        p = params["layers"][str(layer)]
        attention, z = p["attention"], rms(x, p["input_norm"]["scale"], eps)

        def heads(rows, attention=attention):
            return (rows @ attention["qkv"]["kernel"]).reshape(-1, K, G + 2, D)

        def turned(x, scale, position, theta=c.rope.theta):
            return rotated(rms(x, scale, eps), position, theta)

        old, new = heads(context), heads(z)
        out = np.zeros((M, K, G, D))
        for m in range(M):
            for head in range(K):
                keys = [turned(old[t, head, G], attention["k_norm"]["scale"], t) for t in range(anchor)]
                values = list(old[:, head, G + 1])
                for other in range(m + 1 if config.causal[layer] else M):
                    keys.append(turned(new[other, head, G], attention["k_norm"]["scale"], anchor + other))
                    values.append(new[other, head, G + 1])
                for g in range(G):
                    q = turned(new[m, head, g], attention["q_norm"]["scale"], anchor + m)
                    out[m, head, g] = softmax(np.stack(keys) @ q * c.attention_scale) @ np.stack(values)
        x = x + out.reshape(M, -1) @ attention["out"]["kernel"]
        gate, up = np.split(rms(x, p["mlp_norm"]["scale"], eps) @ p["mlp"]["gate_up"]["kernel"], 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp"]["down"]["kernel"]
    return rms(x, params["final_norm"]["scale"], eps)
