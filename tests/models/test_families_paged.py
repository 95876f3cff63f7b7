"""Every target family over pages, a chain and a tree: each node's logits are those of its path in one dense forward.

The dense forward is compared with `transformers` elsewhere; here windows, soft caps, sandwich norms, latent attention and the
like must mean the same behind a page table, where depth, not the slot, says how far away an entry lies.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.kvcache import init_layers
from jaxspec.models import decoder, paged
from jaxspec.models.attend import PagedAttend
from jaxspec.models.paged import paged_forward
from jaxspec.trees.tree import DraftTree, chain, from_parents
from tests.drafters.eagle_cases import FIXTURES

FAMILIES = sorted(f.name for f in FIXTURES.glob("target_*") if not f.name.endswith(("sharded", "smallvocab")))
LENGTH, PAGE_SIZE, PAGES = 23, 4, 12
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 4]


@cache
def model(name: str) -> jaxspec.ModelParams:
    return jaxspec.load(FIXTURES / name, dtype=jnp.float32)


def text(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, model(name).config.vocab_size, count).astype(np.int32)


class BySlot(PagedAttend):
    """The mistake: an entry lies as far away as its slot."""

    @classmethod
    def behind(cls, page_table, base, page_size, positions, *rest, **options):
        made = PagedAttend.behind(page_table, base, page_size, positions, *rest, **options)
        slots = base[:, None] + jnp.arange(positions.shape[1])
        return dataclasses.replace(made, positions=slots, inflight_positions=slots)


def verified(name: str, tree: DraftTree) -> np.ndarray:
    """Logits of the nodes behind a text of LENGTH tokens."""
    params, config = model(name).tree, model(name).config
    table = jnp.asarray(np.random.default_rng(1).permutation(PAGES) + 1)[None]
    layers = init_layers(
        config.num_layers, PAGES + 1, PAGE_SIZE, config.num_kv_heads, config.key_head_dim, config.value_head_dim, "float32"
    )
    tokens = jnp.asarray(text(name, LENGTH))[None]
    zero, at = jnp.zeros(1, jnp.int32), jnp.arange(LENGTH)[None]
    x = decoder.embed(params, config, tokens)
    layers = paged_forward(params, config, x, layers, table, zero, at, jnp.ones((1, LENGTH), bool)).layers
    positions = LENGTH + tree.depth
    x = decoder.embed(params, config, tree.tokens)
    visible = None if tree.is_chain else tree.ancestors
    out = paged_forward(
        params, config, x, layers, table, zero + LENGTH, positions, tree.valid, inflight_positions=positions, visible=visible
    )
    return np.asarray(decoder.unembed(params, config, out.hidden, exact=True)[0])


def of_paths(name: str, tree: DraftTree) -> np.ndarray:
    """The same from a dense forward over the text and each node's path."""
    tokens, parents = np.asarray(tree.tokens)[0], np.asarray(tree.parent)[0]
    paths = []
    for node in range(tree.num_nodes):
        path = []
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        paths.append(path)
    longest = max(map(len, paths))
    texts = np.stack([np.concatenate([text(name, LENGTH), path, np.zeros(longest - len(path))]) for path in paths])
    logits = np.asarray(jaxspec.forward(model(name), jnp.asarray(texts, jnp.int32)).logits)
    return np.stack([logits[i, LENGTH + len(path) - 1] for i, path in enumerate(paths)])


def tree_of(name: str, kind: str) -> DraftTree:
    if kind == "chain":
        return chain(jnp.asarray(text(name, 5, seed=2))[None])
    tokens = jnp.asarray(text(name, len(PARENTS), seed=3))[None]
    return from_parents(tokens, jnp.asarray([PARENTS]), jnp.ones((1, len(PARENTS)), bool), max_depth=5)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_have_the_logits_of_their_paths(name, kind, monkeypatch):
    tree = tree_of(name, kind)
    with jax.default_matmul_precision("highest"):
        expected = of_paths(name, tree)
        np.testing.assert_allclose(verified(name, tree), expected, atol=2e-4, rtol=2e-4)
        if kind == "tree" and any(w is not None and w < LENGTH for w in model(name).config.windows):
            monkeypatch.setattr(paged, "PagedAttend", BySlot)
            assert np.abs(verified(name, tree) - expected).max() > 1e-3, "a window counted by slot is seen"


def test_the_families_have_what_could_go_wrong():
    configs = [model(name).config for name in FAMILIES]
    assert sum(any(w is not None and w < LENGTH for w in c.windows) for c in configs) >= 3
    assert any(c.attention_softcap for c in configs) and any(c.logit_softcap for c in configs)
