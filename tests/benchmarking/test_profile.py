"""Parts from names: a compiled program's text and a trace's operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.benchmarking import profile
from jaxspec.benchmarking.parts import PARTS, part_of
from jaxspec.benchmarking.profile import Operation, Source

HLO = """HloModule jit_run_rounds
%fused_computation (p0: bf16[1,8], p1: bf16[8,8]) -> bf16[1,8] {
  %p0 = bf16[1,8]{1,0} parameter(0)
  %dot.1 = f32[1,8]{1,0} dot(%p0, %p1), metadata={op_name="jit(run_rounds)/while/body/target/mlp/dot_general"}
  ROOT %add.1 = bf16[1,8]{1,0} add(%dot.1, %p0), metadata={op_name="jit(run_rounds)/while/body/target/mlp/add"}
}
%nameless_computation (p2: f32[8]) -> f32[8] {
  ROOT %neg = f32[8]{0} negate(%p2)
}
%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %gemm_fusion.3 = bf16[1,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_computation, metadata={op_name="jit(run_rounds)/while/body/target/mlp/add"}
  %orphan = f32[8]{0} fusion(%gemm_fusion.3), kind=kLoop, calls=%nameless_computation
  %user.7 = f32[8]{0} custom-call(%orphan), custom_call_target="kernel", metadata={op_name="jit(run_rounds)/while/body/target/attention/tree_attention/pallas_call"}
  %gemm.2 = f32[8]{0} custom-call(%user.7, %w), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(run_rounds)/while/body/head/dot_general"}
  ROOT %tuple = (s32[], f32[8]) tuple(%i, %gemm.2)
}
"""  # noqa: E501


def test_sources_come_from_the_fusion_its_parts_or_its_user():
    sources = profile.instruction_sources(HLO)
    assert sources["gemm_fusion.3"] == Source("jit(run_rounds)/while/body/target/mlp/add", True)
    assert sources["orphan"] == Source("jit(run_rounds)/while/body/target/attention/tree_attention/pallas_call", False)
    assert sources["gemm.2"].is_product
    assert sources["tuple"].op_name == ""


@pytest.mark.parametrize(
    ("stack", "product", "part"),
    [
        ("jit(run_rounds)/while/body/target/mlp/dot_general", True, "products"),
        ("jit(run_rounds)/while/body/target/mlp/jit(partial_products)/product_kernel/mpmd_map", False, "products"),
        ("jit(run_rounds)/while/body/head/jit(partial_products)/product_kernel/mpmd_map", False, "head"),
        ("jit(run_rounds)/while/body/target/attention/tree_attention/BTKGD/dot_general", True, "attention"),
        ("jit(run_rounds)/while/body/target/attention/kv_write/scatter", False, "pointwise"),
        ("jit(run_rounds)/while/body/draft/attention/tree_attention/pallas_call", False, "draft"),
        ("jit(run_rounds)/while/body/head/dot_general", True, "head"),
        ("jit(run_rounds)/while/body/extend/mlp/dot_general", True, "extend"),
        ("jit(run_rounds)/while/body/accept/argmax", False, "accept"),
        ("jit(run_rounds)/while/body/commit/scatter", False, "commit"),
        ("jit(run_rounds)/while/body/add", False, "other"),
        ("", False, "other"),
    ],
)
def test_parts_by_scope(stack, product, part):
    assert part_of(stack, product) == part
    assert part in PARTS


def test_times_add_up_by_part_and_gaps_lie_between_operations():
    found = [
        Operation("gemm_fusion.3", 1.0, 0.5),
        Operation("gemm_fusion.3", 2.0, 0.5),
        Operation("gemm.2", 2.25, 0.5),
        Operation("unheard_of", 4.0, 0.25),
    ]
    assert profile.seconds_by_part(found, profile.instruction_sources(HLO)) == {"products": 1.0, "head": 0.5, "other": 0.25}
    assert profile.busy_seconds(found) == 0.5 + 0.75 + 0.25
    first, second = profile.idle_gaps(found)
    assert first == (2.75, 1.25, "gemm.2", "unheard_of") and second == (1.5, 0.5, "gemm_fusion.3", "gemm_fusion.3")
    within = [Operation("long", 0.0, 3.0), Operation("short", 1.0, 0.5), Operation("next", 4.0, 1.0)]
    assert profile.idle_gaps(within) == [(3.0, 1.0, "long", "next")]
    assert profile.largest(found, {}, count=1) == [("gemm_fusion", "", 2, 1.0)]


def test_a_trace_names_the_instructions_of_the_program_that_ran():
    @jax.jit
    def scoped(x, w):
        with jax.named_scope("target"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return x @ w

    x = jnp.ones((96, 96))
    program = scoped.lower(x, x).compile()
    program(x, x).block_until_ready()
    found = profile.record(lambda: program(x, x).block_until_ready(), "jit_scoped")
    parts = profile.seconds_by_part(found, profile.instruction_sources(program.as_text()))
    assert {"products", "head"} <= set(parts)
    assert profile.record(lambda: program(x, x).block_until_ready(), "jit_other") == []
