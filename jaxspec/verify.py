"""Verification: which drafts of a tree are accepted, and the token that follows them.

Every verifier walks down from the root. At a node it accepts at most one child; behind the last accepted node it emits
one token more, chosen by the target: the bonus token. All loops are static, over the tree's depth, so that no tree,
however malformed, can make one run on.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from jaxspec.config import ConfigError
from jaxspec.sampling import SamplingState, coins, probabilities, round_keys
from jaxspec.trees.tree import DraftTree


class Acceptance(NamedTuple):
    """What a round emits; A = max_depth + 1.

    Attributes:
      path: accepted nodes, the root first; -1 behind them.
      num_drafts: accepted drafts, the root not counted; num_drafts + 1 tokens are emitted.
      tokens: the emitted tokens: those of path[1:], then the bonus token at index num_drafts; 0 behind it.
    """

    path: Int32[Array, "B A"]
    num_drafts: Int32[Array, " B"]
    tokens: Int32[Array, "B A"]


def accept_greedy(tree: DraftTree, target: Int[Array, "B T"]) -> Acceptance:
    """Accepts the child that is the target's own choice, as long as there is one.

    Args:
      tree: the drafts.
      target: the target's argmax behind every node.
    """
    agrees = tree.tokens == _at_parent(tree, target)
    path, count = _walk(tree, agrees)
    return _emit(tree, path, count, _at(target, _at(path, count)))


def accept_target_only(
    tree: DraftTree,
    probs: Float[Array, "B T V"],
    coins: Float[Array, "B T"],
    final_coins: Float[Array, " B"],
    threshold_single: float | Float[Array, ""] = 1.0,
    threshold_acc: float | Float[Array, ""] = 1.0,
) -> Acceptance:
    """Sampling over a tree without draft probabilities: a node's coin runs through its children's target probabilities.

    The first child whose cumulative probability exceeds coin · threshold_acc is accepted; if none, the bonus token is drawn
    from what the children leave of the target's distribution. With both thresholds at 1 the emitted tokens have exactly
    the target's distribution, however the drafts were made. Smaller thresholds accept more and are lossy: a child is also
    accepted where its probability reaches threshold_single. Children without mass are never accepted.

    Args:
      tree: the drafts; siblings must be distinct tokens.
      probs: the target's distribution behind every node (`sampling.probabilities`).
      coins: uniform numbers in [0, 1) per node.
      final_coins: uniform numbers for the bonus token.
      threshold_single, threshold_acc: in [0, 1] (SGLang's speculative_accept_threshold_single and _acc).
    """
    nodes = tree.num_nodes
    vocab = probs.shape[-1]
    own = _child_prob(tree, probs)
    index = jnp.arange(nodes)
    siblings = (tree.parent[:, :, None] == tree.parent[:, None, :]) & tree.valid[:, None, :] & (index > 0)
    up_to = siblings & (index[None, :] <= index[:, None])
    cumulative = jnp.sum(jnp.where(up_to, own[:, None, :], 0), -1)
    lucky = _at_parent(tree, coins) < cumulative / jnp.maximum(threshold_acc, 1e-9)
    path, count = _walk(tree, (own > 0) & (lucky | (own >= threshold_single)))

    last = _at(path, count)
    row = _at(probs, last)
    refused = _children(tree, last) & (count < tree.max_depth)[:, None]
    refused_ids = jnp.where(refused & (tree.tokens >= 0), tree.tokens, vocab)
    left = row.at[jnp.arange(row.shape[0])[:, None], refused_ids].set(0, mode="drop")
    return _emit(tree, path, count, _draw(left, row, final_coins))


def accept_rejection(
    tree: DraftTree, probs: Float[Array, "B T V"], coins: Float[Array, "B T"], final_coins: Float[Array, " B"]
) -> Acceptance:
    """Speculative sampling over a chain (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    Draft j is accepted when coin · q < p; the first refusal is replaced by a draw from the normalised max(p - q, 0).
    Exact when every draft was drawn from the very q in ``tree.draft_probs``. A q outside (0, 1] means refusal.

    Args:
      tree: a chain with `draft_probs`.
      probs: the target's distribution behind every node.
      coins: uniform numbers per node; node j's decides about node j + 1.
      final_coins: uniform numbers for the last token.

    Raises:
      ConfigError: the tree is no chain or carries no draft probabilities.
    """
    q = _chain_draft_probs(tree, "rejection sampling")
    drafted = _gather_tokens(q, tree.tokens)
    path, count = _walk(tree, (drafted > 0) & (_at_parent(tree, coins) * drafted < _child_prob(tree, probs)))
    row, draft_row = _final_rows(tree, probs, q, count)
    return _emit(tree, path, count, _draw(jnp.maximum(row - draft_row, 0), row, final_coins))


def accept_block(
    tree: DraftTree, probs: Float[Array, "B T V"], coins: Float[Array, "B T"], final_coins: Float[Array, " B"]
) -> Acceptance:
    """Block verification over a chain (Sun et al. 2024, arXiv 2403.10444, algorithm 2): exact, and accepts no fewer on average.

    Instead of stopping at the first refusal, the longest prefix whose own coin accepts it is taken.

    Args and errors as for `accept_rejection`.
    """
    q = _chain_draft_probs(tree, "block verification")
    batch, nodes = tree.tokens.shape
    drafted = _gather_tokens(q, tree.tokens)
    sound = (drafted > 0) & tree.valid
    ratio = jnp.where(sound, _child_prob(tree, probs) / jnp.where(sound, drafted, 1), 0)
    reach = [jnp.ones((batch,), probs.dtype)]
    for j in range(1, nodes):
        reach.append(jnp.minimum(reach[-1] * ratio[:, j], 1))
    reach = jnp.stack(reach, 1)

    # h[j]: the probability of keeping prefix j, given that no longer one was kept.
    excess = jnp.sum(jnp.maximum(reach[:, :-1, None] * probs[:, :-1] - q[:, 1:], 0), -1)
    excess = jnp.pad(excess, ((0, 0), (0, 1)))
    is_end = jnp.arange(nodes) == jnp.sum(tree.valid, 1, keepdims=True) - 1
    certain = is_end | (reach <= 0) | (reach >= 1)
    keep = jnp.where(certain, reach, excess / jnp.where(certain, 1, excess + 1 - reach))
    kept = tree.valid & (_at_parent(tree, coins) < keep)
    kept = kept.at[:, 0].set(True)
    count = jnp.max(jnp.where(kept, jnp.arange(nodes), 0), 1).astype(jnp.int32)
    path = jnp.where(jnp.arange(nodes) <= count[:, None], jnp.arange(nodes), -1).astype(jnp.int32)
    row, draft_row = _final_rows(tree, probs, q, count)
    left = jnp.maximum(_at(reach, count)[:, None] * row - draft_row, 0)
    return _emit(tree, path, count, _draw(left, row, final_coins))


def _at(values: Array, node: Int[Array, " B"]) -> Array:
    """values[b, node[b]] for [B, T] or [B, T, V] arrays."""
    return values[jnp.arange(values.shape[0]), node]


def _at_parent(tree: DraftTree, values: Array) -> Array:
    """What stands at each node's parent; node 0 gets its own entry, which nobody reads."""
    return jnp.take_along_axis(values, jnp.clip(tree.parent, 0, tree.num_nodes - 1), 1)


def _children(tree: DraftTree, node: Int[Array, " B"]) -> Bool[Array, "B T"]:
    """Children stand behind their parent: that alone rules out cycles, whatever the links say."""
    return tree.valid & (tree.parent == node[:, None]) & (jnp.arange(tree.num_nodes) > node[:, None])


def _gather_tokens(rows: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """rows[b, t, tokens[b, t]]; 0 for a token outside the vocabulary."""
    vocab = rows.shape[-1]
    found = jnp.take_along_axis(rows, jnp.clip(tokens, 0, vocab - 1)[..., None], -1)[..., 0]
    return jnp.where((tokens >= 0) & (tokens < vocab), found, 0)


def _child_prob(tree: DraftTree, probs: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Each node's probability under the target behind its parent; 0 for padding."""
    vocab = probs.shape[-1]
    parent = jnp.clip(tree.parent, 0, tree.num_nodes - 1)
    found = probs[jnp.arange(probs.shape[0])[:, None], parent, jnp.clip(tree.tokens, 0, vocab - 1)]
    return jnp.where(tree.valid & (tree.tokens >= 0) & (tree.tokens < vocab), found, 0)


def _walk(tree: DraftTree, accepted: Bool[Array, "B T"]) -> tuple[Int32[Array, "B A"], Int32[Array, " B"]]:
    """From the root to the first accepted child, again and again: the path (-1 behind it) and its number of edges."""
    batch = tree.tokens.shape[0]
    if tree.is_chain:  # all at once: a loop over a block draft's 16 nodes costs a GPU 16 launches
        node = jnp.arange(tree.num_nodes, dtype=jnp.int32)
        follows = (accepted & tree.valid & (tree.parent == node - 1)) | (node == 0)
        reached = jnp.all(follows[:, None, :] | (node[None, :] > node[:, None]), -1)
        return jnp.where(reached, node, -1), jnp.sum(reached, 1, dtype=jnp.int32) - 1
    current = jnp.zeros((batch,), jnp.int32)
    alive = jnp.ones((batch,), bool)
    path = [current]
    for _ in range(tree.max_depth):
        candidates = _children(tree, current) & accepted
        alive &= candidates.any(1)
        current = jnp.where(alive, jnp.argmax(candidates, 1).astype(jnp.int32), current)
        path.append(jnp.where(alive, current, -1))
    path = jnp.stack(path, 1)
    return path, jnp.sum(path >= 0, 1, dtype=jnp.int32) - 1


def _emit(tree: DraftTree, path: Int32[Array, "B A"], count: Int32[Array, " B"], bonus: Int[Array, " B"]) -> Acceptance:
    following = jnp.pad(path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    tokens = jnp.where(following >= 0, jnp.take_along_axis(tree.tokens, jnp.maximum(following, 0), 1), 0)
    at_bonus = jnp.arange(path.shape[1]) == count[:, None]
    return Acceptance(path, count, jnp.where(at_bonus, bonus[:, None], tokens).astype(jnp.int32))


def _chain_draft_probs(tree: DraftTree, what: str) -> Float[Array, "B T V"]:
    """The draft's distributions; entries that are no probabilities count as 0."""
    if tree.draft_probs is None or not tree.is_chain:
        lacking = "is not a chain" if not tree.is_chain else "has no draft_probs"
        raise ConfigError(f"{what} needs a chain with draft probabilities, but this draft tree {lacking}; use target_only")
    q = tree.draft_probs
    return jnp.where((q > 0) & (q <= 1), q, 0)


def _final_rows(
    tree: DraftTree, probs: Float[Array, "B T V"], q: Float[Array, "B T V"], count: Int32[Array, " B"]
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """Target distribution behind a chain's last accepted node, and the one its refused successor was drawn from (or 0)."""
    refused = jnp.minimum(count + 1, tree.num_nodes - 1)
    has_refused = (count + 1 < tree.num_nodes) & _at(tree.valid, refused)
    return _at(probs, count), jnp.where(has_refused[:, None], _at(q, refused), 0)


BLOCK = 256


def _draw(left: Float[Array, "B V"], full: Float[Array, "B V"], coin: Float[Array, " B"]) -> Int[Array, " B"]:
    """Draws from `left`, or from `full` where rounding has left nothing, by inverse CDF: first the block, then the token."""
    vocab = full.shape[-1]
    weights = jnp.where(jnp.sum(left, -1, keepdims=True) > 0, left, full)
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(weights.shape[0], -1, BLOCK)
    sums = jnp.sum(weights, -1)
    block, before = _invert(sums, coin * jnp.sum(sums, -1))
    token, _ = _invert(_at(weights, block), coin * jnp.sum(sums, -1) - before)
    return block * BLOCK + token


def _invert(weights: Float[Array, "B n"], target: Float[Array, " B"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first entry with mass whose cumulative weight exceeds `target`, else the last with mass; the weight before it."""
    cumulative = jnp.cumsum(weights, -1)
    above = (cumulative > target[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], -1)
    entry = jnp.where(above.any(-1), jnp.argmax(above, -1), last)
    return entry, _at(cumulative - weights, entry)


MODES = ("target_only", "rejection", "block")


@dataclasses.dataclass(frozen=True)
class Verifier:
    """How a round verifies a tree. Hashable: a static argument of its program.

    Greedy rows get the target's argmax in every mode, alone or in a batch with sampled rows. The random numbers of a row
    depend on its key and its committed length only.

    Attributes:
      mode: "target_only" for any tree, "rejection" or "block" for chains with draft probabilities.
      threshold_single, threshold_acc: see `accept_target_only`; other modes have none.

    Raises:
      ConfigError: unknown mode, or a threshold outside [0, 1].
    """

    mode: str = "target_only"
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self):
        if self.mode not in MODES:
            raise ConfigError(f"verification mode={self.mode!r} must be one of {', '.join(MODES)}")
        for name in ("threshold_single", "threshold_acc"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} must be in [0, 1]")

    def __call__(
        self,
        tree: DraftTree,
        logits: Float[Array, "B T V"],
        sampling: SamplingState,
        keys: Key[Array, " B"],
        length: Int[Array, " B"],
    ) -> Acceptance:
        """Verifies a tree.

        Args:
          tree: the drafts.
          logits: from `sampling.process_logits`.
          sampling: parameters of the rows.
          keys: one per sequence, from `sampling.row_keys`; not yet folded with the length.
          length: committed tokens.

        Raises:
          ConfigError: a tree that the mode cannot verify.
        """
        if not sampling.any_sampled:
            return accept_greedy(tree, jnp.argmax(logits, -1))
        probs = probabilities(logits, sampling)
        accept_coins, final_coins = coins(round_keys(keys, length), tree.num_nodes)
        if self.mode == "rejection":
            return accept_rejection(tree, probs, accept_coins, final_coins)
        if self.mode == "block":
            return accept_block(tree, probs, accept_coins, final_coins)
        return accept_target_only(tree, probs, accept_coins, final_coins, self.threshold_single, self.threshold_acc)
