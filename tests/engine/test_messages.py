"""What the policy is told, and that it is plain Python."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jaxspec.config import ConfigError
from jaxspec.engine import blocks, core, jobs, messages, pages, prefix, scheduler
from jaxspec.engine.messages import SchedulerConfig
from jaxspec.sampling_params import SamplingParams, sampling_class
from tests.engine.simulation import make_limits


@pytest.mark.parametrize(
    "sampling, kind",
    [
        (SamplingParams(), "greedy"),
        (SamplingParams(temperature=1.0, top_k=1), "greedy"),
        (SamplingParams(temperature=1.0), "sampled"),
        (SamplingParams(repetition_penalty=1.1), "full"),
        (SamplingParams(temperature=1.0, logit_bias=((3, 1.0),)), "full"),
        (SamplingParams(min_new_tokens=1), "full"),
    ],
)
def test_sampling_class(sampling, kind):
    assert sampling_class(sampling) == kind


@pytest.mark.parametrize(
    "change", [{"pipeline_depth": 3}, {"prefill_budget": 0}, {"schedule_policy": "lifo"}, {"schedule_conservativeness": 0.0}]
)
def test_a_config_out_of_range_is_named(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        SchedulerConfig(**change)


def test_limits_out_of_range_are_named():
    with pytest.raises(ConfigError, match=r"buckets=\(2, 1\)"):
        make_limits(buckets=(2, 1))
    with pytest.raises(ConfigError, match="page_size=0"):
        make_limits(page_size=0)


def test_the_policy_imports_no_jax():
    for module in (messages, pages, prefix, blocks, jobs, scheduler, core):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not {name.split(".")[0] for name in names} & {"jax", "jaxlib", "flax", "pallas_kernels"}, module
