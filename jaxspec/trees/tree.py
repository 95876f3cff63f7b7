"""Draft trees: the one shape in which every drafter hands its proposal to the verifier.

Node 0 is the last emitted token (the "bonus" of the round before); its KV is not yet written. A chain is a tree with
one child per node, plain decoding a tree of one node. Everything here is jit-traceable with static shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.pytree import pytree

WORD = 32


@pytree(static=("max_depth", "is_chain"))
class DraftTree:
    """T nodes per sequence. Parents precede their children; siblings are ordered by index and hold distinct tokens.

    Attributes:
      tokens: node tokens; node 0 is the root.
      parent: index of the parent, -1 for node 0.
      depth: edges between a node and the root.
      ancestors: bit words; bit j of row i is set when node i sees node j: itself and its ancestors.
      valid: False for padding, which is nobody's child and is never accepted.
      draft_probs: [B, T, V], the distribution a node's token was drawn from, where a verifier wants q; else None.
      max_depth: static bound of `depth`: at most this many drafts are accepted.
      is_chain: static; node i is the parent of node i + 1, so accepted KV never has to move.
    """

    tokens: Int[Array, "B T"]
    parent: Int[Array, "B T"]
    depth: Int[Array, "B T"]
    ancestors: UInt32[Array, "B T W"]
    valid: Bool[Array, "B T"]
    draft_probs: Float[Array, "B T V"] | None = None
    max_depth: int = 0
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        """T: nodes per sequence, root included (SGLang's num_draft_tokens)."""
        return self.tokens.shape[1]


def num_words(bits: int) -> int:
    """How many uint32 words hold `bits` bits."""
    return -(-bits // WORD)


def pack_bits(mask: Bool[Array, "*R M"]) -> UInt32[Array, "*R W"]:
    """Packs the last axis into words: bit j % 32 of word j // 32 is entry j."""
    bits = mask.shape[-1]
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, num_words(bits) * WORD - bits)]
    words = jnp.pad(mask, padding).reshape(*mask.shape[:-1], num_words(bits), WORD).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack_bits(words: UInt32[Array, "*R W"], bits: int) -> Bool[Array, "*R M"]:
    """The inverse of `pack_bits` for the first `bits` entries."""
    index = jnp.arange(bits)
    return ((words[..., index // WORD] >> (index % WORD).astype(jnp.uint32)) & 1).astype(bool)


def from_parents(
    tokens: Int[Array, "B T"],
    parent: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    max_depth: int,
    draft_probs: Float[Array, "B T V"] | None = None,
) -> DraftTree:
    """Builds a tree from parent links, tolerating malformed ones.

    A node is kept only if its chain of parents reaches the root over kept nodes, with falling indices, within
    `max_depth` steps: cycles, self-links, links out of range and orphans become padding. Nothing here can loop.

    Args:
      tokens: node tokens, root first.
      parent: parent indices; whatever stands at node 0 is ignored.
      valid: nodes that exist; node 0 always does.
      max_depth: static bound on the depth.
      draft_probs: kept as it is.
    """
    nodes = tokens.shape[1]
    index = jnp.arange(nodes)
    is_root = (index == 0)[None]
    valid = (valid & (parent >= 0) & (parent < index)) | is_root
    parent = jnp.where(valid & ~is_root, parent, -1)
    own = jnp.eye(nodes, dtype=bool)
    seen = own | (parent[..., None] == index)
    # Each squaring doubles how many generations a node sees; one that does not see the root within max_depth is not kept.
    for _ in range(min(nodes - 1, max(max_depth - 1, 0)).bit_length()):
        seen = jnp.matmul(seen.astype(jnp.float32), seen.astype(jnp.float32)) > 0
    depth = seen.sum(-1, dtype=jnp.int32) - 1
    valid = valid & seen[..., 0] & (depth <= max_depth)
    return DraftTree(
        tokens=tokens,
        parent=jnp.where(valid, parent, -1),
        depth=jnp.where(valid, depth, 0),
        ancestors=pack_bits(jnp.where(valid[..., None], seen, own)),
        valid=valid,
        draft_probs=draft_probs,
        max_depth=max_depth,
        is_chain=nodes == 1,
    )


def chain(
    tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None, draft_probs: Float[Array, "B T V"] | None = None
) -> DraftTree:
    """A chain: node i is the child of node i - 1. Nodes behind the first invalid one are invalid too."""
    batch, nodes = tokens.shape
    index = jnp.broadcast_to(jnp.arange(nodes), (batch, nodes))
    valid = jnp.ones((batch, nodes), bool) if valid is None else valid
    valid = jnp.cumprod(valid.at[:, 0].set(True), axis=1).astype(bool)
    return DraftTree(
        tokens=tokens,
        parent=jnp.where(valid, index - 1, -1),
        depth=jnp.where(valid, index, 0),
        ancestors=jnp.broadcast_to(pack_bits(jnp.tril(jnp.ones((nodes, nodes), bool))), (batch, nodes, num_words(nodes))),
        valid=valid,
        draft_probs=draft_probs,
        max_depth=nodes - 1,
        is_chain=True,
    )


def root_only(tokens: Int[Array, " B"]) -> DraftTree:
    """Plain decoding: the tree of one node."""
    return chain(tokens[:, None])


def select_candidates(
    root: Int[Array, " B"],
    scores: Float[Array, "B C"],
    tokens: Int[Array, "B C"],
    parent_candidate: Int[Array, "B C"],
    *,
    num_draft_tokens: int,
    max_depth: int,
) -> tuple[DraftTree, Int[Array, "B N"]]:
    """EAGLE-2's re-ranking (Li et al. 2024, section 4.2): keeps the num_draft_tokens - 1 best of all recorded candidates.

    Cumulative probabilities never rise along a path, so a kept candidate's parent is kept too; ties go to the lower
    index, which is the parent's. The kept ones stay in creation order.

    Args:
      root: the bonus token.
      scores: cumulative probability of every candidate of every level, levels one after another.
      tokens: their tokens.
      parent_candidate: flat index of a candidate's parent, -1 for children of the root.
      num_draft_tokens: nodes of the tree, root included; at most C + 1.
      max_depth: levels.

    Returns:
      The tree and the kept flat indices, ascending.
    """
    batch, _ = scores.shape
    _, kept = jax.lax.top_k(scores, num_draft_tokens - 1)
    kept = jnp.sort(kept, axis=1).astype(jnp.int32)
    wanted = jnp.take_along_axis(parent_candidate, kept, 1)
    match = wanted[:, :, None] == kept[:, None, :]
    parent = jnp.where(wanted < 0, 0, jnp.where(match.any(-1), jnp.argmax(match, -1) + 1, -1))
    tree = from_parents(
        jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, kept, 1)], 1),
        jnp.concatenate([jnp.full((batch, 1), -1), parent], 1).astype(jnp.int32),
        jnp.ones((batch, num_draft_tokens), bool),
        max_depth=max_depth,
    )
    return tree, kept


def candidate_parents(beams: Int[Array, "B S K"], topk: int) -> Int[Array, "B C"]:
    """Flat parent index of every candidate, from the flat index of every beam of every level that was expanded.

    Level 0 holds k children of the root; level i > 0 holds k children of each of the k beams chosen from level i - 1.
    """
    batch = beams.shape[0]
    first = jnp.full((batch, topk), -1, jnp.int32)
    return jnp.concatenate([first, jnp.repeat(beams.reshape(batch, -1), topk, axis=1).astype(jnp.int32)], 1)


# (level, tokens [B,k], parent beam [B,k], visible [B,k,W], aux) -> (probabilities [B,k,k], tokens [B,k,k], aux)
Expand = Callable[[int, Array, Array, Array, Any], tuple[Array, Array, Any]]


def grow(
    root: Int[Array, " B"],
    first_probs: Float[Array, "B K"],
    first_tokens: Int[Array, "B K"],
    expand: Expand,
    aux: Any,
    *,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
) -> tuple[DraftTree, Any]:
    """Grows EAGLE-2's dynamic tree: num_steps levels, topk beams a level, then `select_candidates`.

    Unlike SGLang, whose beams keep the scratch KV column of their slot when they are re-selected, every beam here sees
    the KV of its own ancestors: `expand` is told which of the level·k entries written so far each beam may see.

    Args:
      root: the bonus token.
      first_probs, first_tokens: the k best continuations of the root, best first (level 1, no forward needed).
      expand: runs the draft over the k beams of one level. It receives the level (0 for the first call), the beams'
        tokens, the beam of the level before that each continues (all 0 at level 0), the visibility words over the
        in-flight entries (beam j of level i is entry i·k + j, itself included) and `aux`, and returns each beam's k
        best continuations with their probabilities, best first.
      aux: the drafter's own state (cache, recurrent vectors), threaded through.
      num_steps, topk, num_draft_tokens: SGLang's parameters, already validated.
    """
    batch = root.shape[0]
    if topk == 1:
        tokens, token = [root], first_tokens[:, 0]
        zero = jnp.zeros((batch, 1), jnp.int32)
        for level in range(num_steps):
            tokens.append(token)
            if level < num_steps - 1:
                entries = jnp.arange(level + 1)
                visible = pack_bits(jnp.ones((batch, 1, entries.size), bool))
                _, ids, aux = expand(level, token[:, None], zero, visible, aux)
                token = ids[:, 0, 0]
        return chain(jnp.stack(tokens, 1)), aux

    scores, tokens, beams = [first_probs], [first_tokens], []
    beam_scores, beam_tokens = first_probs, first_tokens
    beam_flat = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), (batch, topk))
    beam_parent = jnp.zeros((batch, topk), jnp.int32)
    lineage = jnp.zeros((batch, topk, 0), bool)
    offset = topk
    for level in range(num_steps - 1):
        own = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch, topk, topk))
        lineage = jnp.concatenate([lineage, own], -1)
        probs, ids, aux = expand(level, beam_tokens, beam_parent, pack_bits(lineage), aux)
        children = (beam_scores[..., None] * probs).reshape(batch, topk * topk)
        ids = ids.reshape(batch, topk * topk)
        scores.append(children)
        tokens.append(ids)
        beams.append(beam_flat)
        beam_scores, chosen = jax.lax.top_k(children, topk)
        beam_tokens = jnp.take_along_axis(ids, chosen, 1)
        beam_parent = (chosen // topk).astype(jnp.int32)
        beam_flat = (offset + chosen).astype(jnp.int32)
        lineage = jnp.take_along_axis(lineage, beam_parent[..., None], 1)
        offset += topk * topk
    table = jnp.stack(beams, 1) if beams else jnp.zeros((batch, 0, topk), jnp.int32)
    tree, _ = select_candidates(
        root,
        jnp.concatenate(scores, 1),
        jnp.concatenate(tokens, 1).astype(jnp.int32),
        candidate_parents(table, topk),
        num_draft_tokens=num_draft_tokens,
        max_depth=num_steps,
    )
    return tree, aux
