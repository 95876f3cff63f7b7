"""Every drafter on a tiny model, and engines over them: what the acceptance tests of the engine run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.config import SpecConfig
from jaxspec.drafters.eagle import model as eagle_model
from jaxspec.drafters.mtp.config import mtp_config
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.loading import DraftParams
from tests import tiny
from tests.drafters import dflash_cases, eagle_cases, mtp_cases, uno_cases
from tests.specs import spec_of


class Case(NamedTuple):
    """What an engine drafts with.

    Attributes:
      params: the target.
      draft, spec: as for `jaxspec.generate`.
      sampled: its drafts are drawn, so that only sampled requests use it fully.
    """

    params: jaxspec.ModelParams
    draft: Any
    spec: SpecConfig
    sampled: bool = False

    @property
    def algorithm(self) -> str:
        """ "auto", or "none" where there is nothing to draft with."""
        return "auto" if self.draft is not None or self.params.drafts else "none"

    @property
    def drafting(self) -> dict[str, Any]:
        """Keywords of `jaxspec.generate` and `jaxspec.Engine`."""
        return {"draft": self.draft, "algorithm": self.algorithm, "spec": self.spec}


TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
CHAIN = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}


@cache
def one_layer() -> jaxspec.ModelParams:
    """A target of one layer and few tokens, which repeats itself soon, with a tokenizer of one character a token."""
    made = eagle_cases.tiny_target(vocab=24, num_layers=1)
    return jaxspec.ModelParams(made.tree, made.config, tiny.CharTokenizer())


@cache
def related_draft() -> jaxspec.ModelParams:
    """A draft model for `one_layer`: itself with noise on its weights, so that it is right about half of the time."""
    made = one_layer()
    leaves, structure = jax.tree.flatten(made.tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [x + 0.15 * x.std() * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jaxspec.ModelParams(structure.unflatten(noisy), made.config, made.tokenizer)


def filled_history() -> NgramHistory:
    """A history that has read some text."""
    history = NgramHistory()
    history.insert(np.random.default_rng(5).integers(0, 24, 60).tolist())
    return history


def _dflash(variant: str, sampled: bool = False, **spec) -> Case:
    return Case(dflash_cases.target(), dflash_cases.random_draft(variant), spec_of(**spec), sampled)


def _mtp(layers: int, **spec) -> Case:
    """MTP layers of a target with so few tokens that random drafts are accepted now and then."""
    target = mtp_cases.dense_target(vocab=4)
    return Case(mtp_cases.with_mtp(target, mtp_config(target.config, "mimo", layers)), None, spec_of(**spec))


def _peagle() -> Case:
    """The same of a parallel EAGLE head."""
    target = eagle_cases.tiny_target(vocab=4)
    config = eagle_cases.head_config(target.config, **eagle_cases.VARIANTS["peagle"])
    return Case(target, DraftParams(eagle_model.init_params(config, jax.random.key(1)), config), spec_of())


BUILDERS: dict[str, Callable[[], Case]] = {
    "none": lambda: Case(one_layer(), None, spec_of()),
    "ngram": lambda: Case(one_layer(), NgramHistory(), spec_of(num_draft_tokens=5)),
    "ngram history": lambda: Case(one_layer(), filled_history(), spec_of(num_draft_tokens=5)),
    "standalone chain": lambda: Case(one_layer(), related_draft(), spec_of(**CHAIN)),
    "standalone tree": lambda: Case(one_layer(), related_draft(), spec_of(**TREE)),
    "eagle": lambda: Case(*eagle_cases.trained("e2e_eagle2"), spec_of(**CHAIN)),
    "eagle3 tree": lambda: Case(*eagle_cases.trained("e2e_eagle3"), spec_of(**TREE)),
    "peagle": _peagle,
    "mtp one layer": lambda: _mtp(1, **TREE),
    "mtp layer per step": lambda: _mtp(3, num_steps=3, topk=1, num_draft_tokens=4),
    "dflash chain": lambda: _dflash("deepspec"),
    "dflash tree": lambda: _dflash("sliding", topk=2, num_draft_tokens=6),
    "dspark": lambda: _dflash("dspark", True),
    "uno chain": lambda: Case(uno_cases.target(), uno_cases.random_adapter(), spec_of(num_draft_tokens=4)),
    "uno tree": lambda: Case(uno_cases.target(), uno_cases.random_adapter(), spec_of(topk=2, num_draft_tokens=6)),
}
NAMES = tuple(BUILDERS)
ALWAYS = ("ngram", "eagle3 tree", "mtp layer per step", "uno tree")
SOME = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
"""All names; most of them only among the slow tests."""


@cache
def case_of(name: str) -> Case:
    """A case by its name in `BUILDERS`."""
    return BUILDERS[name]()


SETTINGS = {"max_running_requests": 2, "context_length": 96, "max_total_tokens": 256, "page_size": 4}
"""Of an engine with two rows, small pages, and a context that needs few of them."""


def texts(name: str, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, case_of(name).params.config.vocab_size, n).tolist() for n in lengths]


def alone(name: str, prompt: list[int], **request: Any):
    """What `jaxspec.generate` answers to a prompt by itself."""
    made = case_of(name)
    return jaxspec.generate(made.params, prompt, **made.drafting, **request)


def told(result) -> tuple:
    """What an answer must have in common with the run alone."""
    s = result.stats
    return result.tokens, result.finish_reason, result.from_draft, s.rounds, s.accepted, s.proposed, s.accepted_histogram
