"""UNO against the recorded numbers: the gated rows, three cycles of two passes, a whole greedy run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.drafter import UnoDrafter
from jaxspec.engine.batch import Batch, open_batch
from jaxspec.loading import load_draft
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.models.paged import paged_forward
from jaxspec.round import context, draft, verify
from tests.parity.checks import Case, Mismatch, load_case
from tests.parity.checks.eagle import PAGE_SIZE, accepted_drafts, load_target, related


class RecordedNoise(UnoDrafter):
    """Drafts over noise that stands among its parameters, as "noise" [B, rows - 1]."""

    def propose(self, params, state, ctx):
        return self.propose_over({k: x for k, x in params.items() if k != "noise"}, state, ctx, params["noise"])


def open_prompt(folder: Path, case: Case, rows: int, new: int) -> Batch:
    """The prompt of a case taken in, with chains of `rows` rows over recorded noise."""
    target = load_target(related(folder, "target"))
    adapter = load_draft(folder, target, dtype=jnp.float32)
    batch = open_batch(
        target,
        [case.arrays["prompt_ids"].tolist()],
        draft=adapter,
        algorithm="UNO",
        spec=SpecConfig(num_draft_tokens=rows),
        ignore_eos=True,
        max_new_tokens=new,
        page_size=PAGE_SIZE,
        prefill_chunk=4,
    )
    batch.prefill()
    fields = {f.name: getattr(batch.program.drafter, f.name) for f in dataclasses.fields(UnoDrafter)}
    batch.program = dataclasses.replace(batch.program, drafter=RecordedNoise(**fields))
    return batch


@jax.jit
def gated_logits(params, adapter, tokens, gate) -> jax.Array:
    """Logits [T, V] of a dense forward whose rows have the adapter where `gate` is set."""
    config = params.config
    tree = uno_model.adapted(params.tree, adapter.tree, adapter.config.scale, gate[None, :, None])
    positions = jnp.arange(tokens.size)[None]
    x = decoder.embed(tree, config, tokens[None])
    out = decoder.decode(tree, config, x, positions, causal_attend(positions), [None] * config.num_layers)
    return decoder.unembed(tree, config, out.hidden)[0]


def check_draft(folder: Path) -> float:
    """The prompt with the adapter on all rows, on none, on some; then both passes of three cycles."""
    case, target = load_case(folder), load_target(related(folder, "target"))
    adapter, prompt = load_draft(folder, target, dtype=jnp.float32), jnp.asarray(case.arrays["prompt_ids"])
    gates = {"all_lora": np.ones(prompt.size, bool), "base": np.zeros(prompt.size, bool)}
    gates["mixed"] = case.arrays["mixed.gate"] > 0
    error = 0.0
    for name, gate in gates.items():
        error = max(error, case.compare(f"{name}.logits", gated_logits(target, adapter, prompt, jnp.asarray(gate))))

    committed = case.arrays["committed_ids"]
    rows = len(case.arrays["cycle1.draft_input_ids"])
    batch = open_prompt(folder, case, rows, len(committed) - prompt.size)
    program, state, params = batch.program, batch.state, batch.draft_tree
    config = target.config

    @jax.jit
    def cycle(state, noise):
        logits, _ = program.drafter.run(params, context(program, target.tree, state, ~state.done), noise)
        state, tree = draft(program, target.tree, params | {"noise": noise}, state)
        base = state.cache.length
        out = paged_forward(
            target.tree,
            config,
            decoder.embed(target.tree, config, tree.tokens),
            state.cache.layers,
            state.cache.page_table,
            base,
            base[:, None] + tree.depth,
            tree.valid,
        )
        checked = decoder.unembed(target.tree, config, out.hidden)
        return logits[0], tree.tokens[0], checked[0], verify(program, target.tree, params, state, tree)

    for i, name in enumerate(("cycle1", "cycle2", "cycle3"), 1):
        stage, before = case.group(name), state.cache.length[0]
        case.compare(f"{name}.start", np.asarray(before))
        fed = jnp.asarray(stage["draft_input_ids"])
        case.compare(f"{name}.draft_input_ids", jnp.concatenate([state.bonus, fed[1:]]))
        drafted, tokens, checked, state = cycle(state, fed[None, 1:])
        error = max(error, case.compare(f"{name}.draft_logits", drafted))
        case.compare(f"{name}.verify_input_ids", tokens)
        error = max(error, case.compare(f"{name}.verify_logits", checked))
        case.compare(f"{name}.accepted_drafts", np.asarray(accepted_drafts(state, i)))
        case.compare(f"{name}.committed_ids", state.tokens[0, before + 1 : state.cache.length[0] + 1])
    case.compare("committed_ids", state.tokens[0, : committed.size])
    return error


def check_end_to_end(folder: Path) -> float:
    """A recorded greedy run over its own noise: drafts, accepted drafts and tokens of every cycle."""
    case = load_case(folder)
    a = case.arrays
    rows, new = a["noise_ids"].shape[1] + 1, len(a["output_ids"]) - len(a["prompt_ids"])
    batch = open_prompt(folder, case, rows, new + rows)
    program, state, target_tree, params = batch.program, batch.state, batch.tree, batch.draft_tree

    @jax.jit
    def cycle(state, noise):
        state, tree = draft(program, target_tree, params | {"noise": noise}, state)
        return tree.tokens[0, 1:], verify(program, target_tree, params, state, tree)

    for i, (noise, accepted) in enumerate(zip(a["noise_ids"], a["accepted_drafts"], strict=True)):
        before = int(state.cache.length[0])
        drafts, state = cycle(state, jnp.asarray(noise)[None])
        case.compare(f"draft_ids[{i}]", drafts, a["draft_ids"][i])
        found, count = accepted_drafts(state, i + 1), int(state.cache.length[0]) - before
        if found != accepted or count != accepted + 2:
            raise Mismatch(f"cycle {i}: {found} drafts accepted and {count} tokens emitted instead of {accepted} drafts")
    case.compare("output_ids", state.tokens[0, : len(a["output_ids"])])
    return 0.0
