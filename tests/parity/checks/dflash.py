"""Block drafts against the numbers that their authors' own code computes from the same files."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.dflash import heads as dflash_heads
from jaxspec.engine.batch import open_batch
from jaxspec.loading import load_draft
from jaxspec.round import draft, verify
from jaxspec.trees.block_tree import best_first
from jaxspec.trees.tree import unpack_bits
from pallas_kernels.vocabulary.api import top_k
from tests.parity.checks import Case, Mismatch, load_case
from tests.parity.checks.eagle import NUM_PAGES, PAGE_SIZE, context, load_target, related, target_features

BUILD = jax.jit(best_first, static_argnames=("num_nodes", "whole_families"))
FEATURES = jax.jit(target_features, static_argnums=1)
STEP = jax.jit(dflash_heads.step, static_argnums=1)
UPDATE = jax.jit(lambda drafter, *args: drafter.update(*args), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def outputs(drafter, params, state, ctx):
    """Block outputs, those of the predicting slots, base logits, and the proposal."""
    hidden, _ = drafter.run(params, state.layers, ctx)
    return hidden, *drafter.predictions(params, ctx, hidden), drafter.propose(params, state, ctx)


def check_draft(folder: Path) -> float:
    """Three rounds over one cache: features, block outputs, logits, what the heads add, drafts; then trees."""
    case, target = load_case(folder), load_target(related(folder, "target"))
    head = load_draft(folder, target.config, dtype=jnp.float32)
    config, params, a = head.config, head.tree, case.arrays
    if list(config.taps) != case.info["taps"]["hidden_states_index"]:
        raise Mismatch(f"taps {config.taps} instead of {case.info['taps']['hidden_states_index']}")
    drafter, params = registry.prepare("auto", target, head, SpecConfig())[2:]
    tokens = a["token_ids"]
    features = FEATURES(target, config.taps, jnp.asarray(tokens))[0]
    state = drafter.init(params, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32)
    error, at = 0.0, 0
    for name in ("round1", "round2", "round3"):
        stage = case.group(name)
        count = len(stage["context_positions"])
        case.compare(f"{name}.context_positions", np.arange(at, at + count))
        error = max(error, case.compare(f"{name}.context_features", features[at : at + count]))
        fed = np.pad(stage["context_features"], ((0, len(tokens) - count), (0, 0)), constant_values=np.nan)[None]
        n = jnp.full(1, count, jnp.int32)
        state = UPDATE(drafter, params, state, context(target, at, tokens), None, fed, n)
        at += count
        ctx = context(target, at, tokens)
        block = np.where(np.arange(config.block_size) == 0, tokens[at], config.mask_token_id)
        case.compare(f"{name}.block_token_ids", block)
        case.compare(f"{name}.block_positions", at + np.arange(config.block_size))
        block, hidden, base, proposal = outputs(drafter, params, state, ctx)
        error = max(error, case.compare(f"{name}.block_hidden", block[0]))
        error = max(error, compare_drafts(case, name, config, params, hidden, base))
        case.compare(f"{name}.draft_token_ids", proposal.tree.tokens[0, 1:])
        if name == "round1":
            error = max(error, check_trees(case, tokens[at]))
        state = proposal.state
    return error


def compare_drafts(case: Case, name: str, config, params, hidden, base) -> float:
    """Base logits; then, along the greedy path, what the heads make of them."""
    stage = case.group(name)
    error = case.compare(f"{name}.logits", base[0])
    previous = jnp.asarray([[stage["block_token_ids"][0], *stage["draft_token_ids"]]])
    state, steps = dflash_heads.initial_state(config, 1), []
    for i in range(config.num_drafts):
        steps.append(STEP(params, config, hidden[:, i], base[:, i], previous[:, i : i + 1], state))
        state = steps[-1].state
    logits = jnp.stack([s.logits[0, 0] for s in steps])
    for array in ("step_logits", "selector_scores"):
        if array in stage:
            error = max(error, case.compare(f"{name}.{array}", logits))
    if "candidates" in stage:
        case.compare(f"{name}.candidates", jnp.stack([s.ids[0, 0] for s in steps]))
    if "confidence_logits" in stage:
        found = dflash_heads.confidence(params, config, hidden, previous[:, :-1])
        error = max(error, case.compare(f"{name}.confidence_logits", found[0]))
    return error


def check_trees(case: Case, root: int) -> float:
    """Trees of given width and budget over the first round's logits, nodes in the order of their creation."""
    log_probs, error = jax.nn.log_softmax(jnp.asarray(case.arrays["round1.logits"]))[None], 0.0
    for name in case.groups:
        match = re.fullmatch(r"tree_w(\d+)_b(\d+)", name)
        if not match:
            continue
        width, budget = map(int, match.groups())
        best, ids = top_k(log_probs, width)
        tree = BUILD(jnp.full(1, root, jnp.int32), best, ids, num_nodes=budget, whole_families=True)
        got = {"tokens": tree.tokens, "parents": tree.parent, "depths": tree.depth}
        for array, value in got.items():
            case.compare(f"{name}.{array}", value[0])
        seen = unpack_bits(tree.ancestors, budget)[0]
        case.compare(f"{name}.ancestors", seen)
        own = log_probs[0, jnp.maximum(tree.depth[0] - 1, 0), tree.tokens[0]].at[0].set(0)
        error = max(error, case.compare(f"{name}.scores", seen.astype(jnp.float32) @ own))
    return error


def check_end_to_end(folder: Path) -> float:
    """A recorded greedy run: the block, the accepted drafts and the tokens of every round."""
    case, target = load_case(folder), load_target(related(folder, "target"))
    head = load_draft(folder, target.config, dtype=jnp.float32)
    a = case.arrays
    prompt, new = a["prompt_ids"].tolist(), len(a["output_ids"]) - len(a["prompt_ids"])
    batch = open_batch(
        target,
        [prompt],
        draft=head,
        algorithm="DFLASH",
        ignore_eos=True,
        max_new_tokens=new,
        page_size=PAGE_SIZE,
        prefill_chunk=4,
    )
    batch.prefill()
    program, state = batch.program, batch.state
    propose, check = jax.jit(draft, static_argnums=0), jax.jit(verify, static_argnums=0)
    for i, (block, committed) in enumerate(zip(a["blocks"], a["committed_per_round"], strict=True)):
        before = int(state.cache.length[0])
        state, tree = propose(program, target.tree, batch.draft_tree, state)
        if block.min() >= 0:  # near the limit upstream shortens the block itself, which changes its drafts
            case.compare(f"blocks[{i}]", tree.tokens[0], block)
        state = check(program, target.tree, batch.draft_tree, state, tree)
        count = int(state.cache.length[0]) - before
        if block.min() >= 0 and count != committed:
            raise Mismatch(f"round {i}: {count} tokens committed instead of {committed}")
    case.compare("output_ids", state.tokens[0, : len(a["output_ids"])])
    return 0.0
