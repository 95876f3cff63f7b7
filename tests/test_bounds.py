"""Sizes that no machine has: refused by name at once, before anything is compiled or allocated for them."""

import time

import pytest

import jaxspec
from jaxspec.config import MAX_PAGE, MAX_PREFILL, MAX_TREE, ConfigError
from jaxspec.engine.config import EngineConfig
from tests import tiny

BOUNDS = {
    "num_draft_tokens": MAX_TREE,
    "num_steps": MAX_TREE,
    "topk": MAX_TREE,
    "page_size": MAX_PAGE,
    "prefill_chunk": MAX_PREFILL,
}
WRONG = [10**6 * 5, 10**9, 2**63, 0, -1, 1.5, "8", True]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", BOUNDS)
def test_arguments_of_generate(name, value):
    begun = time.process_time()
    with pytest.raises(ConfigError, match=f"{name}=.* must be a whole number of at least 1 and at most {BOUNDS[name]}"):
        jaxspec.generate(tiny.target(), [1, 2, 3], algorithm="NGRAM", **{name: value})
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["page_size", "chunked_prefill_size", "prefill_budget"])
def test_arguments_of_the_engine(name, value):
    most = MAX_PAGE if name == "page_size" else MAX_PREFILL
    with pytest.raises(ConfigError, match=f"{name}=.* must be a whole number of at least 1 and at most {most}"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name, most", BOUNDS.items())
def test_bounds_themselves_are_fine(name, most):
    if most == MAX_TREE:
        assert getattr(jaxspec.SpecConfig(**{name: most}), name) == most
    elif name == "page_size":
        assert EngineConfig(page_size=most).page_size == most
