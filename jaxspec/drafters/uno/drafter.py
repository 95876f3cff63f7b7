"""UNO (arXiv 2609.04010): the target drafts for itself, through a low-rank adapter that acts on noise rows only.

One pass reads [bonus token, noise, noise, …]. Its first row runs on the target's own weights and so gives an exact token,
the root of the tree that the second pass, the ordinary verification, checks; the other rows run with the adapter and
draft what follows. The first row's KV stays, the noise rows' KV is overwritten by the second pass.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.drafters.base import Drafter, Proposal, RoundContext
from jaxspec.drafters.uno import model as uno_model
from jaxspec.drafters.uno.config import UnoConfig, UnoOptions, check_target
from jaxspec.kvcache import LayerKV
from jaxspec.models import decoder
from jaxspec.models.paged import paged_forward
from jaxspec.sampling import DRAFT, NOISE, coins, probabilities, process_logits, tagged
from jaxspec.trees.block_tree import best_first
from jaxspec.trees.tree import DraftTree, chain, num_words, root_only
from jaxspec.verify import accept_target_only
from pallas_kernels.vocabulary.api import top_k

CHAIN, TREE = 8, (15, 32)
"""Defaults: nodes of a chain; depth and nodes of a tree."""


@dataclasses.dataclass(frozen=True)
class UnoDrafter(Drafter):
    """Drafts with block_size rows: a chain of num_draft_tokens nodes, or a tree of so many over the rows' candidates.

    Attributes:
      adapter: the adapter.
      block_size: rows of the draft pass, the exact one included.
      topk: candidates per depth of a tree; 1 for a chain.
      num_draft_tokens: nodes, the exact token, which is the root, included.
      noise: what stands in the drafting rows, one of `uno_config.NOISE_KINDS`.
      noise_below: random ids lie in 1 … noise_below - 1.
      mask_token_id: what stands there with noise "mask".
      sampled: draw the drafts of a chain and keep their distributions, for rejection sampling and block verification;
        else drafts are the most probable ones in sampled requests, too.
    """

    adapter: UnoConfig
    block_size: int
    topk: int
    num_draft_tokens: int
    noise: str = "uniform"
    noise_below: int = 0
    mask_token_id: int | None = None
    sampled: bool = False
    name: ClassVar[str] = "UNO"
    num_exact: ClassVar[int] = 1
    target_passes: ClassVar[int] = 2

    @property
    def slack(self) -> int:
        """The bonus token and the tree behind it, or the rows of the draft pass."""
        return max(self.num_draft_tokens + 1, self.block_size)

    @property
    def max_accept(self) -> int:
        """The exact token, a full path and the bonus token."""
        return min(self.block_size, self.num_draft_tokens) + 1

    def propose(self, params, state, ctx: RoundContext) -> Proposal:
        """Runs the draft pass over fresh noise; the tree's root is the exact token."""
        return self.propose_over(params, state, ctx, self.noise_ids(ctx))

    def noise_ids(self, ctx: RoundContext) -> Int[Array, "B n"]:
        """Noise for the rows that draft: a function of the round's keys, of the text alone, or the mask token."""
        shape = (self.block_size - 1,)
        if self.noise == "mask":
            return jnp.full((ctx.bonus.shape[0], *shape), self.mask_token_id, jnp.int32)
        keys = text_keys(ctx.tokens, ctx.cache.length) if self.noise == "hash" else ctx.keys
        return jax.vmap(lambda key: jax.random.randint(key, shape, 1, self.noise_below))(tagged(keys, NOISE))

    def propose_over(self, params, state, ctx: RoundContext, noise: Int[Array, "B n"]) -> Proposal:
        """`propose` for given noise ids."""
        logits, layers = self.run(params, ctx, noise)
        logits = self.process(ctx, logits)
        with jax.named_scope("exact"):
            exact = choose(ctx, logits[:, :1])
        drafts = logits[:, 1:]
        if self.topk == 1:
            tree = self.chain(ctx, exact, drafts)
        else:
            scores = jax.nn.log_softmax(drafts / ctx.sampling.temperature[:, None, None], axis=-1)
            best, ids = top_k(scores, self.topk)
            tree = best_first(exact, best, ids.astype(jnp.int32), num_nodes=self.num_draft_tokens)
        num_exact = ctx.active.astype(jnp.int32)
        return Proposal(tree=tree, state=state, layers=layers, exact=exact[:, None], num_exact=num_exact)

    def run(self, params, ctx: RoundContext, noise: Int[Array, "B n"]) -> tuple[Float[Array, "B T V"], tuple[LayerKV, ...]]:
        """The pass over [bonus, noise …] at positions length, length + 1, …: raw logits of all rows, the target's pools."""
        config, base = ctx.config, ctx.cache.length
        tokens = jnp.concatenate([ctx.bonus[:, None], noise], 1)
        rows = jnp.broadcast_to(jnp.arange(self.block_size), tokens.shape)
        target = uno_model.adapted(ctx.params, params, self.adapter.scale, (rows > 0)[..., None], self.adapter)
        out = paged_forward(
            target,
            config,
            decoder.embed(ctx.params, config, tokens),
            ctx.cache.layers,
            ctx.cache.page_table,
            base,
            base[:, None] + rows,
            jnp.broadcast_to(ctx.active[:, None], rows.shape),
        )
        return decoder.unembed(ctx.params, config, out.hidden, exact=True), out.layers

    def process(self, ctx: RoundContext, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """The one logits pipeline: the first row as in plain decoding; drafts see the penalties of the same text.

        A grammar is known for the first row only, as the others stand behind tokens that are not yet chosen.
        """
        batch, rows, vocab = logits.shape
        allowed = None
        if ctx.allowed is not None:
            free = jnp.full((batch, rows - 1, num_words(vocab)), jnp.uint32(0xFFFFFFFF))
            allowed = jnp.concatenate([ctx.allowed[:, None], free], 1)
        return process_logits(
            logits, ctx.sampling, side_by_side(ctx.bonus, rows), ctx.tokens, ctx.cache.length + 1, ctx.prompt_length, allowed
        )

    def chain(self, ctx: RoundContext, exact: Int[Array, " B"], logits: Float[Array, "B D V"]) -> DraftTree:
        """One draft a row; drawn ones come from the very distribution that the verifier gets."""
        if not (self.sampled and ctx.sampling.any_sampled):
            return chain(jnp.concatenate([exact[:, None], jnp.argmax(logits, -1).astype(jnp.int32)], 1))
        probs = probabilities(logits, ctx.sampling)
        keys = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))(
            tagged(ctx.keys, DRAFT), jnp.arange(logits.shape[1], dtype=jnp.uint32)
        )
        drafts = jax.vmap(jax.vmap(jax.random.categorical))(keys, jnp.log(probs)).astype(jnp.int32)
        return chain(jnp.concatenate([exact[:, None], drafts], 1), None, jnp.pad(probs, ((0, 0), (1, 0), (0, 0))))


def choose(ctx: RoundContext, logits: Float[Array, "B 1 V"]) -> Int[Array, " B"]:
    """The exact token: what plain decoding would choose behind the bonus token, with the very same random number.

    The verifier's numbers belong to the position behind it, so none is used twice.
    """
    if not ctx.sampling.any_sampled:
        return jnp.argmax(logits[:, 0], -1).astype(jnp.int32)
    accept_coins, final_coins = coins(ctx.keys, 1)
    tree = root_only(ctx.bonus)
    return accept_target_only(tree, probabilities(logits, ctx.sampling), accept_coins, final_coins).tokens[:, 0]


def side_by_side(root: Int[Array, " B"], rows: int) -> DraftTree:
    """Rows that count as so many tokens behind the root and see no drafted tokens, for the logits pipeline."""
    shape = (root.shape[0], rows)
    return DraftTree(
        tokens=jnp.broadcast_to(root[:, None], shape),
        parent=jnp.full(shape, -1, jnp.int32),
        depth=jnp.broadcast_to(jnp.arange(rows), shape),
        ancestors=jnp.zeros((*shape, num_words(rows)), jnp.uint32).at[..., 0].set(1),
        valid=jnp.ones(shape, bool),
        max_depth=rows - 1,
    )


def text_keys(tokens: Int[Array, "B max_len"], length: Int[Array, " B"]) -> Key[Array, " B"]:
    """Random keys that follow from the text up to index `length` alone: a polynomial hash modulo 2^32."""
    index = jnp.arange(tokens.shape[1])
    powers = jnp.cumprod(jnp.full(index.shape, 0x01000193, jnp.uint32), dtype=jnp.uint32)
    terms = jnp.where(index <= length[:, None], (tokens.astype(jnp.uint32) + 1) * powers, 0)
    key = jax.random.key(0, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.sum(terms, 1, dtype=jnp.uint32))


def capacity(depth: int, topk: int) -> int:
    """Most nodes that a tree of that depth and branching can have, the root included; no more than 2^31."""
    total, level = 1, 1
    for _ in range(depth):
        level *= topk
        total += level
        if total >= 2**31:
            return 2**31
    return total


def resolve(spec: SpecConfig, config: ModelConfig, draft) -> SpecConfig:
    """The block and the tree, in SGLang's reading of the three parameters.

    A chain (topk = 1, the default) has num_draft_tokens rows and as many nodes; num_steps is 1, the one draft pass. A tree
    has num_steps + 1 rows, topk candidates at each depth and num_draft_tokens nodes: any number that the depth and topk
    allow, where SGLang asks for num_steps + 1 to 128 nodes with num_draft_tokens · topk <= 2048.

    Args:
      spec: as asked for.
      config: the target.
      draft: `DraftParams` with a `UnoConfig`.

    Raises:
      ConfigError: a parameter is out of range or cannot be combined with another.
    """
    mask_token(spec.options, config, draft.config)
    topk = 1 if spec.topk is None else spec.topk
    if topk > config.vocab_size:
        raise ConfigError(f"topk={topk} exceeds the vocabulary of {config.vocab_size} tokens")
    steps, nodes = spec.num_steps, spec.num_draft_tokens
    if topk == 1:
        if nodes is None:
            nodes = CHAIN if steps in (None, 1) else steps + 1
        if nodes < 2:
            raise ConfigError(f"num_draft_tokens={nodes} must be at least 2 with topk=1: the exact token and one draft")
        if steps not in (None, 1, nodes - 1):
            raise ConfigError(
                f"num_steps={steps} disagrees with num_draft_tokens={nodes}: with topk=1 one pass drafts the whole chain, so "
                f"num_steps is 1 (or the {nodes - 1} drafts); leave it out"
            )
        return dataclasses.replace(spec, num_steps=1, topk=1, num_draft_tokens=nodes)
    steps = TREE[0] if steps is None else steps
    most = capacity(steps, topk)
    nodes = min(TREE[1], most) if nodes is None else nodes
    if not 2 <= nodes <= most:
        raise ConfigError(
            f"num_draft_tokens={nodes} is out of range: with num_steps={steps} and topk={topk} a tree has 2 to {most} nodes"
        )
    return dataclasses.replace(spec, num_steps=steps, topk=topk, num_draft_tokens=nodes)


def mask_token(options: UnoOptions, config: ModelConfig, adapter: UnoConfig) -> int | None:
    """The mask token, from the parameters or the adapter's file; None where nobody names it.

    Raises:
      ConfigError: a mask token outside the vocabulary, or none where one is needed.
    """
    mask = adapter.mask_token_id if options.mask_token_id is None else options.mask_token_id
    if mask is None and options.noise == "mask":
        raise ConfigError("uno_noise='mask' needs uno_mask_token_id: the adapter's file names no mask token")
    if mask is not None and not 2 <= mask < config.vocab_size:
        raise ConfigError(f"uno_mask_token_id={mask} must lie in 2 … {config.vocab_size - 1}: it is a row of the embedding")
    return mask


def build(target, draft, spec: SpecConfig) -> tuple[UnoDrafter, dict]:
    """The drafter and its parameters.

    Args:
      target: the target's `ModelParams`.
      draft: `DraftParams` with a `UnoConfig`.
      spec: from `resolve`.

    Raises:
      ConfigError: the adapter was made for another target.
    """
    check_target(draft.config, target.config)
    mask = mask_token(spec.options, target.config, draft.config)
    drafter = UnoDrafter(
        adapter=draft.config,
        block_size=spec.num_draft_tokens if spec.topk == 1 else spec.num_steps + 1,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        noise=spec.options.noise,
        noise_below=target.config.vocab_size if mask is None else mask,
        mask_token_id=mask,
        sampled=spec.verification != "target_only",
    )
    return drafter, draft.tree
