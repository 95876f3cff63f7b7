"""The parts of a round, recognised by the named scopes of `jaxspec.round` wherever these survive: in traces and programs."""

from __future__ import annotations

PARTS = ("draft", "attention", "products", "head", "pointwise", "accept", "commit", "extend", "other")
"""`draft`: all levels, with their own attention and head. `attention`, `products`, `pointwise`: of the target's layers; the
last is norms, rotary embedding, KV writes, residuals. `head`: the target's. `accept`: logits pipeline and verifier.
`commit`: output, compaction. `extend`: the drafter catches up. `other`: what carries no scope, copies and loop control."""

PRODUCT_KERNEL = "product_kernel"
"""Scope of `pallas_kernels.product.mosaic`, which the compiled program shows as a custom call."""
_TOP = {"draft": "draft", "extend": "extend", "commit": "commit", "head": "head", "accept": "accept"}


def part_of(name_stack: str, is_product: bool) -> str:
    """The part that an operation belongs to.

    Args:
      name_stack: its scopes, outermost first, separated by slashes ("jit(run_rounds)/while/body/target/attention/…").
      is_product: whether it is a matrix product (with a weight, if it stands outside the attention itself).
    """
    scopes = name_stack.split("/")
    for scope in scopes:
        if scope in _TOP:
            return _TOP[scope]
        if scope == "target":
            if "tree_attention" in scopes:
                return "attention"
            return "products" if is_product or PRODUCT_KERNEL in scopes else "pointwise"
    return "other"
