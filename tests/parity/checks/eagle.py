"""EAGLE heads against the numbers that their authors' own code computes from the same files."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.base import RoundContext
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.eagle.drafter import EagleDrafter
from jaxspec.engine.batch import open_batch
from jaxspec.kvcache import PagedKVCache
from jaxspec.loading import ModelParams, load, load_draft
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from jaxspec.round import RoundState, draft, verify
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from jaxspec.trees.tree import pack_bits, unpack_bits
from tests.parity.checks import Case, Mismatch, load_case

PAGE_SIZE, NUM_PAGES = 4, 24


@cache
def load_target(folder: Path) -> ModelParams:
    """A case's target, in float32."""
    return load(folder, dtype=jnp.float32)


def related(folder: Path, key: str) -> Path:
    """The case folder that a case names under `key`."""
    return (folder / json.loads((folder / "case.json").read_text())[key]).resolve()


def context(target: ModelParams, length: int, tokens) -> RoundContext:
    """A context of one sequence with `length` committed tokens, its pages in no particular order."""
    pages = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).astype(np.int32)
    tokens = jnp.pad(jnp.asarray(tokens), (0, 64 - len(tokens)))[None]
    return RoundContext(
        params=target.tree,
        cache=PagedKVCache((), jnp.asarray(pages)[None], jnp.full(1, length, jnp.int32)),
        tokens=tokens,
        bonus=tokens[:, length],
        keys=row_keys([0]),
        sampling=sampling_state([SamplingParams()], target.config.vocab_size, [[]], [True]),
        prompt_length=jnp.zeros(1, jnp.int32),
        active=jnp.ones(1, bool),
        config=target.config,
    )


@partial(jax.jit, static_argnums=(0, 1))
def target_features(target: ModelParams, taps: tuple[int, ...], tokens) -> jax.Array:
    """The taps [1, T, ·] of a dense forward of the target."""
    tokens = jnp.asarray(tokens)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    x = decoder.embed(target.tree, target.config, tokens)
    none = [None] * target.config.num_layers
    return decoder.decode(target.tree, target.config, x, positions, causal_attend(positions), none, taps).features


def accepted_drafts(state: RoundState, number: int) -> int:
    """Drafts of the only row that round `number` (from 1) emitted."""
    return int((state.from_draft[0] & (state.round_of[0] == number)).sum())


def chain_drafter(config) -> EagleDrafter:
    """A drafter for running single steps."""
    return EagleDrafter(config, num_steps=1, topk=1, num_draft_tokens=2)


def check_draft(folder: Path) -> float:
    """Taps, prefill, two tree levels and the catch-up step: logits and recurrent states."""
    case, target = load_case(folder), load_target(related(folder, "target"))
    head = load_draft(folder, target.config, dtype=jnp.float32)
    if head.config.mask_token_id is not None:
        from tests.parity.checks.peagle import check_parallel_draft

        return check_parallel_draft(case, target, head)
    config, params, a = head.config, head.tree, case.arrays
    taps = case.info.get("taps")
    if taps and list(config.taps) != taps["hidden_states_index"]:
        raise Mismatch(f"taps {config.taps} instead of {taps['hidden_states_index']}")
    drafter = chain_drafter(config)
    P = len(a["prefill.token_ids"])
    error = case.compare("prefill.features", target_features(target, config.taps, a["prompt_ids"][:P])[0])

    project = jax.jit(partial(eagle_model.project, config=config))
    head_of, run, next_level = jax.jit(drafter.logits), jax.jit(drafter.run), jax.jit(drafter.level, static_argnums=(2, 6))

    def compare(stage: str, out) -> float:
        logits = head_of(params, ctx, out)[0]
        return max(case.compare(f"{stage}.state", out[0]), case.compare(f"{stage}.logits", logits))

    def feed(stage: str, layers):
        tokens, positions = a[f"{stage}.token_ids"][None], a[f"{stage}.positions"][None]
        hidden = project(params, features=a[f"{stage}.features"][None])
        return run(params, ctx, tokens, hidden, layers, positions, jnp.ones(tokens.shape, bool))

    layers = drafter.init(params, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32).layers
    ctx = context(target, 0, a["prompt_ids"])
    out, layers = feed("prefill", layers)
    error = max(error, compare("prefill", out))

    ctx = context(target, P, a["prompt_ids"])
    aux, k = (layers, out[:, -1:]), len(a["level1.token_ids"])
    _, ids = drafter.best(params, ctx, out[:, -1], k)
    case.compare("level1.token_ids", ids[0])
    for level in range(2):
        stage = f"level{level + 1}"
        parent = a.get(f"{stage}.parents", np.zeros(k, np.int32))
        error = max(error, case.compare(f"{stage}.input_state", np.asarray(aux[1])[0, parent]))
        case.compare(f"{stage}.positions", np.full(k, P + level))
        levels = tuple(i for i in range(level + 1) for _ in range(k))
        visible = pack_bits(jnp.asarray(a[f"{stage}.allow"]))[None]
        out, aux = next_level(
            params, ctx, level, a[f"{stage}.token_ids"][None], jnp.asarray(parent)[None], visible, levels, aux
        )
        error = max(error, compare(stage, out))
    out, _ = feed("extend", aux[0])
    return max(error, compare("extend", out))


@partial(jax.jit, static_argnums=(0, 1))
def prefilled_tree(drafter: EagleDrafter, target: ModelParams, params: dict, prompt, features):
    """The logits [1, V] behind a prompt with given features, and the tree that is drafted there."""
    P = features.shape[1]
    state = drafter.init(params, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32)
    first = context(target, 0, prompt[0])
    state = drafter.prefill(params, state, first, prompt[:, :P], prompt[:, P:], features, jnp.full(1, P, jnp.int32))
    ctx = context(target, P, prompt[0])
    return drafter.logits(params, ctx, state.hidden), drafter.propose(params, state, ctx).tree


def check_tree(folder: Path) -> float:
    """Dynamic trees: tokens, parents, depths and visibility of every (depth, topk, total) in the case."""
    case, source = load_case(folder), related(folder, "draft")
    target = load_target(related(folder, "target"))
    head = load_draft(source, target.config, dtype=jnp.float32)
    prompt, P = case.arrays["prompt_ids"], len(case.arrays["features"])
    error = case.compare("features", target_features(target, head.config.taps, prompt[:P])[0])
    for name in case.groups:
        if f"{name}.tokens" not in case.arrays:
            continue
        depth, topk, total = (int(x) for x in name[1:].replace("k", " ").replace("t", " ").split())
        spec = SpecConfig(num_steps=depth + 1, topk=topk, num_draft_tokens=total)
        drafter, params = registry.prepare("auto", target, head, spec)[2:]
        logits, tree = prefilled_tree(drafter, target, params, jnp.asarray(prompt)[None], case.arrays["features"][None])
        error = max(error, case.compare("prefill.last_logits", logits[0]))
        got = {"tokens": tree.tokens, "parents": tree.parent, "depths": tree.depth, "mask": unpack_bits(tree.ancestors, total)}
        for array, value in got.items():
            case.compare(f"{name}.{array}", value[0])
    return error


def check_end_to_end(folder: Path) -> float:
    """A recorded greedy run: the tree, the accepted path and the tokens of every round."""
    case, target = load_case(folder), load_target(related(folder, "target"))
    head = load_draft(folder, target.config, dtype=jnp.float32)
    shape, prompt = case.info["tree"], case.arrays["prompt_ids"].tolist()
    spec = SpecConfig(num_steps=shape["depth"] + 1, topk=shape["topk"], num_draft_tokens=shape["total"])
    output, rounds = case.arrays["output_ids"], len(case.arrays["accepted"])
    batch = open_batch(
        target,
        [prompt],
        draft=head,
        algorithm=head.config.algorithm,
        spec=spec,
        ignore_eos=True,
        max_new_tokens=len(output) - len(prompt) + shape["depth"] + 2,
        page_size=PAGE_SIZE,
        prefill_chunk=4,
    )
    batch.prefill()
    program, state = batch.program, batch.state
    propose = jax.jit(draft, static_argnums=0)
    check = jax.jit(verify, static_argnums=0)
    for i in range(rounds):
        state, tree = propose(program, target.tree, batch.draft_tree, state)
        case_row = Case(case.folder, case.info, {k: v[i] for k, v in case.arrays.items() if k.startswith("tree_")})
        case_row.compare("tree_tokens", tree.tokens[0])
        case_row.compare("tree_parents", tree.parent[0])
        state = check(program, target.tree, batch.draft_tree, state, tree)
        accepted = accepted_drafts(state, i + 1)
        if accepted != case.arrays["accepted"][i]:
            raise Mismatch(f"round {i}: {accepted} drafts accepted instead of {case.arrays['accepted'][i]}")
    case.compare("output_ids", state.tokens[0, : int(state.cache.length[0])])
    return 0.0
