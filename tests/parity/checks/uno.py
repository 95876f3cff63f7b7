"""UNO against the recorded numbers: the gated rows, three cycles of two passes, a whole greedy run."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafters import uno_model
from jaxspec.generation import Session, start
from jaxspec.loading import load_draft
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.models.paged import paged_forward
from jaxspec.round import context, verify
from jaxspec.sampling import SamplingParams
from tests.parity.checks import Case, Mismatch, load_case
from tests.parity.checks.eagle import PAGE_SIZE, load_target, related


def open_session(folder: Path, case: Case, rows: int, new: int) -> Session:
    """The prompt of a case taken in, with chains of `rows` rows."""
    target = load_target(related(folder, "target"))
    adapter = load_draft(folder, target, dtype=jnp.float32)
    session = start(
        target, [case.arrays["prompt_ids"].tolist()], draft=adapter, algorithm="UNO", spec=SpecConfig(num_draft_tokens=rows),
        sampling=[SamplingParams()], stop_ids=[[]], ignore_eos=True, max_new_tokens=new, page_size=PAGE_SIZE, prefill_size=4,
    )  # fmt: skip
    session.prefill()
    return session


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
    session = open_session(folder, case, rows, len(committed) - prompt.size)
    program, state, params = session.program, session.state, session.draft_tree
    config = target.config

    @jax.jit
    def cycle(state, noise):
        ctx = context(program, target.tree, state)
        logits, _ = program.drafter.run(params, ctx, noise)
        proposal = program.drafter.propose_over(params, state.draft, ctx, noise)
        tree, base = proposal.tree, state.cache.length + 1
        out = paged_forward(
            target.tree, config, decoder.embed(target.tree, config, tree.tokens), proposal.layers, state.cache.page_table,
            base, base[:, None] + tree.depth, tree.valid,
        )  # fmt: skip
        checked = decoder.unembed(target.tree, config, out.hidden)
        return logits[0], tree.tokens[0], checked[0], *verify(program, target.tree, params, state, proposal)

    for name in ("cycle1", "cycle2", "cycle3"):
        stage = case.group(name)
        case.compare(f"{name}.start", np.asarray(state.cache.length[0]))
        fed = jnp.asarray(stage["draft_input_ids"])
        case.compare(f"{name}.draft_input_ids", jnp.concatenate([state.bonus, fed[1:]]))
        drafted, tokens, checked, state, out = cycle(state, fed[None, 1:])
        error = max(error, case.compare(f"{name}.draft_logits", drafted))
        case.compare(f"{name}.verify_input_ids", tokens)
        error = max(error, case.compare(f"{name}.verify_logits", checked))
        case.compare(f"{name}.accepted_drafts", np.asarray(out.num_drafts[0]))
        case.compare(f"{name}.committed_ids", out.tokens[0, : int(out.count[0])])
    case.compare("committed_ids", state.tokens[0, : committed.size])
    return error


def check_end_to_end(folder: Path) -> float:
    """A recorded greedy run over its own noise: drafts, accepted drafts and tokens of every cycle."""
    case = load_case(folder)
    a = case.arrays
    rows, new = a["noise_ids"].shape[1] + 1, len(a["output_ids"]) - len(a["prompt_ids"])
    session = open_session(folder, case, rows, new + rows)
    program, state, target = session.program, session.state, session.params

    @jax.jit
    def cycle(state, noise):
        proposal = program.drafter.propose_over(session.draft_tree, state.draft, context(program, target.tree, state), noise)
        return proposal.tree.tokens[0, 1:], *verify(program, target.tree, session.draft_tree, state, proposal)

    for i, (noise, accepted) in enumerate(zip(a["noise_ids"], a["accepted_drafts"], strict=True)):
        drafts, state, out = cycle(state, jnp.asarray(noise)[None])
        case.compare(f"draft_ids[{i}]", drafts, a["draft_ids"][i])
        if int(out.num_drafts[0]) != accepted or int(out.count[0]) != accepted + 2:
            raise Mismatch(f"cycle {i}: {int(out.num_drafts[0])} drafts accepted instead of {accepted}")
    case.compare("output_ids", state.tokens[0, : len(a["output_ids"])])
    return 0.0
