"""A parallel EAGLE head against the numbers of its authors' code."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.eagle import model as eagle_model
from tests.parity.checks import Case
from tests.parity.checks.eagle import NUM_PAGES, PAGE_SIZE, context, target_features


def check_parallel_draft(case: Case, target, head) -> float:
    """One pass over real pairs and mask slots: projections, states, logits; then the drafter's own chain."""
    a, config, params = case.arrays, head.config, head.tree
    P, rows = len(a["features"]), len(a["token_ids"])
    num_steps = rows - P + 1
    drafter, params = registry.prepare("peagle", target, head, SpecConfig(num_steps=num_steps, topk=1))[2:]
    error = case.compare("features", target_features(target, config.taps, a["prompt_ids"][:P])[0])
    masks = np.broadcast_to(np.asarray(params["mask_hidden"]), (num_steps - 1, config.feature_size))
    hidden = eagle_model.project(params, config, jnp.asarray(np.concatenate([a["features"], masks]))[None])
    error = max(error, case.compare("projected", hidden[0]))

    ctx, fresh = context(target, 0, a["prompt_ids"]), drafter.init(params, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32)
    valid = jnp.ones((1, rows), bool)
    out, _ = drafter.run(params, ctx, jnp.asarray(a["token_ids"])[None], hidden, fresh.layers, a["positions"][None], valid)
    error = max(error, case.compare("hidden", out[0]), case.compare("logits", drafter.logits(params, ctx, out)[0]))

    state, prompt = fresh, a["prompt_ids"]
    for begin, end in ((0, 4), (4, P)):  # two chunks: the mask slots of the first one must leave no trace
        state = drafter.prefill(
            params,
            state,
            context(target, begin, prompt),
            jnp.asarray(prompt[begin:end])[None],
            jnp.asarray(prompt[end : end + 1])[None],
            jnp.asarray(a["features"][begin:end])[None],
            jnp.full(1, end - begin),
        )
    tree = drafter.propose(params, state, context(target, P, prompt)).tree
    case.compare("draft_token_ids", tree.tokens[0, 1:])
    return max(error, case.compare("hidden", state.hidden[0], a["hidden"][P - 1 :]))
