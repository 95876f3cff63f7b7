"""Checks of the tree builder and the verifiers against SGLang's own kernels and test vectors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import sampling, verify
from jaxspec.trees.tree import DraftTree, candidate_parents, chain, from_parents, grow, select_candidates, unpack_bits
from tests.parity.checks import Case, load_case
from tests.parity.checks.statistics import assert_distribution

ROUNDS = 40_000
FAMILY_WISE_ERROR = 1e-3


def links(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """First child and next sibling of every node, -1 for none: SGLang's form of a tree."""
    parent, valid = np.asarray(tree.parent), np.asarray(tree.valid)
    child, sibling = np.full_like(parent, -1), np.full_like(parent, -1)
    for b, nodes in enumerate(parent):
        newest = {}
        for i in range(1, len(nodes)):
            if valid[b, i]:
                if nodes[i] in newest:
                    sibling[b, newest[nodes[i]]] = i
                else:
                    child[b, nodes[i]] = i
                newest[nodes[i]] = i
    return child, sibling


def relabel(next_token: np.ndarray, next_sibling: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers the nodes breadth first, so that parents precede children and siblings ascend in their list's order.

    Returns [bs, N] arrays: the original node of every new one, the new parents, and which nodes the root reaches.
    """
    batch, nodes = next_token.shape
    original = np.zeros((batch, nodes), np.int32)
    parent = np.full((batch, nodes), -1, np.int32)
    valid = np.zeros((batch, nodes), bool)
    for b in range(batch):
        order, up = [0], [-1]
        for new in range(nodes):
            if new < len(order):
                child = next_token[b, order[new]]
                while child >= 0:
                    order.append(child)
                    up.append(new)
                    child = next_sibling[b, child]
        valid[b, : len(order)] = True
        parent[b, : len(order)] = up
        original[b] = order + sorted(set(range(nodes)) - set(order))
    return original, parent, valid


def check_verified(case: Case, group: str, label: str, accepted: verify.Acceptance, original: np.ndarray) -> float:
    """Compares with accept_index, predict and accepted of a group, in the fixture's numbering of the nodes."""
    path, count, tokens = (np.asarray(x) for x in accepted)
    batch, nodes = original.shape
    used = path >= 0
    local = np.where(used, np.take_along_axis(original, np.maximum(path, 0), 1), -1)
    rows = np.where(used, local + nodes * np.arange(batch)[:, None], -1)
    predict = np.full(batch * nodes, -1)
    predict[rows[used]] = tokens[used]
    name = f"{group}.{label}" if label else group
    return max(
        case.compare(f"{name}.accept_index", rows),
        case.compare(f"{name}.predict", predict),
        case.compare(f"{name}.accepted", count),
    )


def linked_tree(data: dict[str, np.ndarray], depth: int) -> tuple[DraftTree, np.ndarray]:
    """The tree of a group that gives candidates, next_token and next_sibling."""
    original, parent, valid = relabel(data["next_token"], data["next_sibling"])
    tokens = np.take_along_axis(data["candidates"], original, 1)
    build = jax.jit(from_parents, static_argnames="max_depth")
    return build(jnp.asarray(tokens), jnp.asarray(parent), jnp.asarray(valid), max_depth=depth), original


def check_parents(case: Case, group: str, tree: DraftTree, original: np.ndarray) -> None:
    """Where a group names the parents of reachable nodes too, the links must mean the same."""
    if f"{group}.parents" not in case.arrays:
        return
    valid, parent = np.asarray(tree.valid), np.asarray(tree.parent)
    for b in range(len(original)):
        said = case.arrays[f"{group}.parents"][b, original[b][valid[b]]]
        up = parent[b][valid[b]]
        case.compare(f"{group}.parents", np.where(up >= 0, original[b][np.maximum(up, 0)], -1), said)


def check_greedy_tree(folder: Path) -> float:
    """Greedy verification: paths, predictions, counts."""
    case, worst = load_case(folder), 0.0
    for group in case.groups:
        data = case.group(group)
        tree, original = linked_tree(data, data["accept_index"].shape[1] - 1)
        check_parents(case, group, tree, original)
        target = np.take_along_axis(data["target_predict"], original, 1)
        accepted = jax.jit(verify.accept_greedy)(tree, jnp.asarray(target))
        worst = max(worst, check_verified(case, group, "", accepted, original))
    return worst


def check_target_only(folder: Path) -> float:
    """Target-only sampling with given uniform numbers, exact and lossy thresholds."""
    case, worst = load_case(folder), 0.0
    for group in case.groups:
        data = case.group(group)
        tree, original = linked_tree(data, data["accept_index"].shape[1] - 1)
        check_parents(case, group, tree, original)
        probs = np.take_along_axis(data["target_probs"], original[..., None], 1)
        coins = np.take_along_axis(data["coins"], original, 1)
        single, acc = (float(x) for x in data["thresholds"])
        accepted = jax.jit(verify.accept_target_only)(
            tree, jnp.asarray(probs), jnp.asarray(coins), jnp.asarray(data["final_coins"]), single, acc
        )
        worst = max(worst, check_verified(case, group, "", accepted, original))
    return worst


def check_chain(folder: Path) -> float:
    """Rejection sampling and block verification of chains with given uniform numbers."""
    case, worst = load_case(folder), 0.0
    for group in case.groups:
        data = case.group(group)
        q = np.pad(data["draft_probs"], ((0, 0), (1, 0), (0, 0)))
        tree = chain(jnp.asarray(data["candidates"]), draft_probs=jnp.asarray(q))
        original = np.broadcast_to(np.arange(tree.num_nodes), data["candidates"].shape)
        rest = (jnp.asarray(data["target_probs"]), jnp.asarray(data["coins"]), jnp.asarray(data["final_coins"]))
        for label, method in (("token", verify.accept_rejection), ("block", verify.accept_block)):
            if f"{label}.accepted" in data:
                worst = max(worst, check_verified(case, group, label, jax.jit(method)(tree, *rest), original))
    return worst


def check_tree_builder(folder: Path) -> float:
    """EAGLE-2's re-ranking, links, positions and masks; and growing the same tree level by level."""
    case, worst = load_case(folder), 0.0
    for group in case.groups:
        data = case.group(group)
        topk, num_steps, nodes = (int(x) for x in data["params"])
        levels = range(num_steps)
        batch = len(data["bonus"])
        scores = [jnp.asarray(data[f"level{i}.scores"]).reshape(batch, -1) for i in levels]
        tokens = [jnp.asarray(data[f"level{i}.tokens"]) for i in levels]
        table = np.concatenate([data[f"level{i}.parents"] for i in levels[:-1]] or [np.zeros((batch, 0), np.int32)], 1)
        beams = jnp.asarray(table[:, 1:].reshape(batch, num_steps - 1, topk))
        root = jnp.asarray(data["bonus"])
        rebuild = jax.jit(partial(select_candidates, num_draft_tokens=nodes, max_depth=num_steps))
        tree, kept = rebuild(root, jnp.concatenate(scores, 1), jnp.concatenate(tokens, 1), candidate_parents(beams, topk))
        child, sibling = links(tree)
        mask = np.asarray(unpack_bits(tree.ancestors, nodes))
        got = {
            "parent_list": table,
            "selected_index": kept,
            "draft_tokens": tree.tokens,
            "tree_parents": tree.parent,
            "positions": data["seq_lens"][:, None] + np.asarray(tree.depth),
            "retrieve_index": np.arange(batch)[:, None] * nodes + np.arange(nodes),
            "next_token": child,
            "next_sibling": sibling,
            "mask_qlen": mask,
        }
        if "mask_packed" in data:
            words = np.ascontiguousarray(np.asarray(tree.ancestors).astype("<u4")).view(np.uint8)
            got["mask_packed"] = words.reshape(batch, nodes, -1)[..., : data["mask_packed"].shape[-1]]
        for name in data:
            if name.startswith("mask_full"):
                got[name] = full_mask(mask, data["seq_lens"])
        for name, value in got.items():
            worst = max(worst, case.compare(f"{group}.{name}", value))
        worst = max(worst, check_growth(case, group, root, scores, tokens, topk, num_steps, nodes))
    return worst


def full_mask(mask: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """SGLang's FULL_MASK: rows of seq_len + N columns per request, the prefix all true, flattened."""
    rows = [np.concatenate([np.ones((len(m), n), bool), m], 1).reshape(-1) for m, n in zip(mask, seq_lens, strict=True)]
    return np.concatenate(rows)


def check_growth(case: Case, group: str, root, scores, tokens, topk: int, num_steps: int, nodes: int) -> float:
    """Replays the recorded levels through `grow`: the same tree must come out."""
    batch = root.shape[0]

    def expand(level, beam_tokens, parent, visible, beam_scores):
        children = scores[level + 1].reshape(batch, topk, topk)
        probs = children / beam_scores[..., None]
        best = jax.lax.top_k(children.reshape(batch, -1), topk)[0]
        return probs, tokens[level + 1].reshape(batch, topk, topk), best

    sizes = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": nodes}
    tree, _ = jax.jit(lambda: grow(root, scores[0], tokens[0], expand, scores[0], **sizes))()
    return max(case.compare(f"{group}.draft_tokens", tree.tokens), case.compare(f"{group}.tree_parents", tree.parent))


def check_distributions(folder: Path) -> float:
    """Chi-square tests of the verifiers with their own random numbers; returns the largest error of a frequency."""
    case = load_case(folder)
    data = case.arrays
    tables = [g for g in dict.fromkeys(n.split(".")[1] for n in data if n.startswith("tree.")) if g.startswith("thr")]
    kinds = [g for g in ("token", "block") if f"chain.{g}.prob" in data]
    level = FAMILY_WISE_ERROR / (len(tables) + 2 * len(kinds))
    worst = 0.0
    keys = sampling.row_keys(range(ROUNDS))
    draw = jax.jit(lambda length, nodes: sampling.coins(sampling.round_keys(keys, length), nodes), static_argnums=1)

    tree, original = linked_tree(case.group("tree"), int(data["tree.depth_limit"]) - 1)
    probs = jnp.asarray(data["tree.target_probs"][original[0]].astype(np.float32))[None]
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROUNDS, *x.shape[1:])), (tree, probs))
    for i, table in enumerate(tables):
        single, acc = (float(x) for x in data[f"tree.{table}.thresholds"])
        drawn = draw(jnp.full(ROUNDS, i), tree.num_nodes)
        accepted = jax.jit(verify.accept_target_only)(*many, *drawn, single, acc)
        node, token = last_and_bonus(accepted)
        expected = zip(data[f"tree.{table}.outcome_node"].tolist(), data[f"tree.{table}.outcome_token"].tolist(), strict=True)
        outcomes = list(zip(original[0][node].tolist(), token.tolist(), strict=True))
        worst = max(worst, assert_distribution(table, outcomes, list(expected), data[f"tree.{table}.outcome_prob"], level))

    for i, kind in enumerate(kinds):
        method = jax.jit({"token": verify.accept_rejection, "block": verify.accept_block}[kind])
        for fixed in (False, True):
            name = f"chain.{kind}_given_fixed" if fixed else f"chain.{kind}"
            chains, probs = sampled_chains(case, ROUNDS, seed=2 * i + fixed, fixed=fixed)
            drawn = draw(jnp.full(ROUNDS, 100 + 2 * i + fixed), chains.num_nodes)
            accepted = method(chains, probs, *drawn)
            used = np.arange(chains.num_nodes) <= np.asarray(accepted.num_drafts)[:, None]
            outcomes = [tuple(row) for row in np.where(used, np.asarray(accepted.tokens), -1).tolist()]
            expected = [tuple(row) for row in data[f"{name}.tokens"].tolist()]
            worst = max(worst, assert_distribution(name, outcomes, expected, data[f"{name}.prob"], level))
    return worst


def last_and_bonus(accepted: verify.Acceptance) -> tuple[np.ndarray, np.ndarray]:
    """The last accepted node and the token behind it."""
    count = np.asarray(accepted.num_drafts)[:, None]
    return (np.take_along_axis(np.asarray(x), count, 1)[:, 0] for x in (accepted.path, accepted.tokens))


def sampled_chains(case: Case, rounds: int, seed: int, fixed: bool) -> tuple[DraftTree, jnp.ndarray]:
    """Chains drawn from the draft's Markov chain (or the fixed one), and the target's rows along them."""
    p, q = (case.arrays[f"chain.{x}"] for x in "pq")
    start, steps = int(case.arrays["chain.start"]), int(case.arrays["chain.num_drafts"])
    random = np.random.default_rng(seed)
    nodes = [np.full(rounds, start)]
    for j in range(steps):
        if fixed:
            nodes.append(np.full(rounds, case.arrays["chain.fixed_drafts"][j]))
        else:
            cdf = np.cumsum(q[nodes[-1]], 1)
            nodes.append(np.minimum((random.random((rounds, 1)) * cdf[:, -1:] >= cdf).sum(1), q.shape[1] - 1))
    tokens = np.stack(nodes, 1).astype(np.int32)
    draft_probs = q[np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]].astype(np.float32)
    return chain(jnp.asarray(tokens), draft_probs=jnp.asarray(draft_probs)), jnp.asarray(p[tokens].astype(np.float32))
