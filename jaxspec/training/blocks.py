"""What objectives of block drafts share: random anchors, and attention of many blocks over one text.

Axis letters beside the project's: A anchors (blocks) of a row, M slots of a block.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.models.decoder import Attend
from jaxspec.training.attention import suits_cudnn
from pallas_kernels.attention.fused import apart, warn_of_cudnn


def sample_anchors(key: PRNGKeyArray, allowed: Bool[Array, "B T"], count: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """`count` different positions of every row, uniformly among the allowed ones, in random order.

    Returns:
      (positions, which of them count): a row with fewer allowed positions is filled up with others that do not.
    """
    length = allowed.shape[1]
    order = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1.0)
    score, index = jax.lax.top_k(order, min(count, length))
    pad = ((0, 0), (0, max(count - length, 0)))
    return jnp.pad(index.astype(jnp.int32), pad), jnp.pad(score >= 0, pad)


def take(x: Array, index: Int[Array, "B A M"]) -> Array:
    """x[b, index[b, a, m]] for x of shape [B, T, …]; indices beyond the end give the last position."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return x[rows, jnp.minimum(index, x.shape[1] - 1)]


def block_attend(positions: Int[Array, "B A M"], context: Int[Array, "B A M"], own: Bool[Array, "B A M M"]) -> Attend:
    """Attention of blocks over the first tokens of their row and over themselves.

    The layer's cache is the context's (keys, values), each [B, T, K, D]; queries come as [B, A · M, H, D]. Scores are
    never kept for the backward pass.

    Args:
      positions: of the slots.
      context: how many tokens of the context each slot sees, from the row's beginning on.
      own: which slots of its block each slot sees; itself at least.
    """

    def attend(cache, q, k, v, *, scale, window, softcap):
        place = jnp.arange(cache[0].shape[1])
        far, near = place < context[..., None], own
        if window is not None:
            far &= positions[..., None] - place < window
            near &= positions[..., :, None] - positions[..., None, :] < window
        plain = softcap is None and q.shape[-1] == v.shape[-1]
        if plain and suits_cudnn(q) and fused_blocks_work():
            return fused_blocks(q, k, v, *cache, far, near, scale), cache
        return jax.checkpoint(partial(blocks, scale=scale, softcap=softcap))(q, k, v, *cache, far, near), cache

    return attend


def blocks(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    context_k: Float[Array, "B T K D"],
    context_v: Float[Array, "B T K D"],
    far: Bool[Array, "B A M T"],
    near: Bool[Array, "B A M M"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B R H D"]:
    """The attention of `block_attend` in two parts, which share one softmax: no block meets another's keys (R = A · M)."""
    B, A, M, _ = far.shape
    (H, D), K = q.shape[2:], k.shape[2]
    q = q.reshape(B, A, M, K, H // K, D)
    k, v = k.reshape(B, A, M, K, D), v.reshape(B, A, M, K, v.shape[-1])
    old = jnp.einsum("BAMKGD,BTKD->BKGAMT", q, context_k, preferred_element_type=jnp.float32) * scale
    new = jnp.einsum("BAMKGD,BANKD->BKGAMN", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        old, new = softcap * jnp.tanh(old / softcap), softcap * jnp.tanh(new / softcap)
    old = jnp.where(far[:, None, None], old, -jnp.inf)
    new = jnp.where(near[:, None, None], new, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(old, -1), jnp.max(new, -1)))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = jnp.sum(old, -1) + jnp.sum(new, -1)
    out = jnp.einsum("BKGAMT,BTKD->BAMKGD", old.astype(v.dtype), context_v, preferred_element_type=jnp.float32)
    out += jnp.einsum("BKGAMN,BANKD->BAMKGD", new.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.moveaxis(total, (1, 2), (3, 4))[..., None]
    return out.astype(v.dtype).reshape(B, A * M, H, v.shape[-1])


def fused_blocks(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B R K D"],
    v: Float[Array, "B R K D"],
    context_k: Float[Array, "B T K D"],
    context_v: Float[Array, "B T K D"],
    far: Bool[Array, "B A M T"],
    near: Bool[Array, "B A M M"],
    scale: float,
    implementation: str = "cudnn",
) -> Float[Array, "B R H D"]:
    """The same as `blocks` in one fused kernel over all keys of the row, whose scores never stand in memory."""
    B, A, M, T = far.shape
    same = jnp.eye(A, dtype=bool)[:, None, :, None]
    own = (near[:, :, :, None] & same).reshape(B, A * M, A * M)
    mask = jnp.concatenate([far.reshape(B, A * M, T), own], -1)[:, None]
    keys, values = jnp.concatenate([context_k, k], 1), jnp.concatenate([context_v, v], 1)
    return jax.nn.dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation=implementation)


@cache
def fused_blocks_work() -> bool:
    """Whether cuDNN compiles `fused_blocks` and its gradient on the default device, and finds what `blocks` finds.

    Warns on a GPU where that is not so.
    """
    return jax.default_backend() in ("gpu", "cuda") and apart(partial(agrees, partial(fused_blocks, scale=TRIAL_SCALE)))


TRIAL_SCALE = 0.125


def agrees(function) -> bool:
    """Whether a function runs, and gives about what `blocks` does, with about the same gradients."""
    B, A, M, T, H, K, D = 2, 8, 8, 128, 4, 2, 64
    shapes = {"q": (A * M, H), "k": (A * M, K), "v": (A * M, K), "context_k": (T, K), "context_v": (T, K)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x = [jax.random.normal(key, (B, *s, D), jnp.bfloat16) for key, s in zip(keys, shapes.values(), strict=True)]
    far = jnp.broadcast_to(jnp.arange(T) < 1 + 8 * jnp.arange(A)[:, None, None], (B, A, M, T))
    near = jnp.broadcast_to(jnp.tril(jnp.ones((M, M), bool)), (B, A, M, M))

    def results(function):
        value, pull = jax.vjp(lambda *x: function(*x, far, near), *x)
        return [value, *pull(jnp.ones_like(value))]

    try:
        found = results(function)
    except Exception as error:  # whatever a missing or old cuDNN raises: there is another way
        warn_of_cudnn("masked attention", error, "training")
        return False
    plain = results(partial(blocks, scale=TRIAL_SCALE, softcap=None))
    same = all(bool(jnp.allclose(a, b, rtol=0.05, atol=0.05)) for a, b in zip(found, plain, strict=True))
    if not same:
        warn_of_cudnn("masked attention", "its results differ from those of plain products", "training")
    return same
