"""Every drafter named on the command line under the settings of JAX that the environment gives, and on two devices.

Run by test_settings.py in a process of its own: these settings hold for a whole process.
"""

import tests.fast_compile  # noqa: F401, I001  before jax

import sys

import jax
import numpy as np

import jaxspec
from tests.engine.cases import SETTINGS, case_of

LENGTH = 10


def check(name: str) -> None:
    """Greedy answers, alone and by an engine, are those of plain decoding under JAX's own settings."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.debug_nans(False):
        case = case_of(name)  # random weights of the usual types, as a checkpoint has them
        prompts = [np.random.default_rng(1).integers(0, case.params.config.vocab_size, n).tolist() for n in (9, 4)]
        shared = {"max_new_tokens": LENGTH, "ignore_eos": True}
        plain = [r.tokens for r in jaxspec.generate(case.params, prompts, algorithm="none", **shared)]
    answers = jaxspec.generate(case.params, prompts, **case.drafting, **shared)
    assert [r.tokens for r in answers] == plain, name
    sampled = jaxspec.generate(case.params, prompts[0], **case.drafting, **shared, temperature=1.0, top_k=5, seed=1)
    assert len(sampled.tokens) == LENGTH
    if name == "ngram":
        with jaxspec.Engine(case.params, **case.drafting, **SETTINGS) as engine:
            assert [r.tokens for r in engine.generate(prompts, **shared)] == plain
    assert jaxspec.forward(case.params, prompts[0]).logits.dtype == np.float32


def check_devices(name: str) -> None:
    """The same trees on one device, then on the other."""
    case = case_of(name)
    prompt = list(range(1, 8))
    answers = []
    for device in jax.devices():
        params = jaxspec.ModelParams(jax.device_put(case.params.tree, device), case.params.config, case.params.tokenizer)
        draft = jax.device_put(case.draft, device) if isinstance(case.draft, jaxspec.DraftParams) else case.draft
        given = {**case.drafting, "draft": draft}
        result = jaxspec.generate(params, prompt, max_new_tokens=LENGTH, ignore_eos=True, **given)
        answers.append(result.tokens)
        with jaxspec.Engine(params, **given, **SETTINGS) as engine:
            answers.append(engine.generate(prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens)
            pools = {d for x in jax.tree.leaves(engine.memory.pools) for d in x.devices()}
            rows = {d for x in jax.tree.leaves(engine._core.device.rows) for d in x.devices()}
        assert pools == rows == {device}, (pools, rows, device)
    assert all(tokens == answers[0] for tokens in answers), answers
    if isinstance(case.draft, jaxspec.DraftParams):
        target = jaxspec.ModelParams(jax.device_put(case.params.tree, jax.devices()[0]), case.params.config)
        try:
            jaxspec.generate(target, prompt, **{**case.drafting, "draft": jax.device_put(case.draft, jax.devices()[1])})
        except jaxspec.ConfigError as error:
            assert "several devices" in str(error), error
        else:
            raise AssertionError("a target and its draft on two devices were taken")


if __name__ == "__main__":
    for case_name in sys.argv[1:]:
        check(case_name)
        print("ok", case_name, flush=True)
    if len(jax.devices()) > 1:
        check_devices("eagle3 tree")
        print("devices ok", flush=True)
