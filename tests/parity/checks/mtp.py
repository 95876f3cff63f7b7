"""DeepSeek-V3 as a target, and MTP layers, against the numbers of transformers and Speculators."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.conversion.drafts import mtp
from jaxspec.conversion.targets import hf_config
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.drafters.mtp.drafter import MtpDrafter
from jaxspec.files.folders import open_tensors
from jaxspec.loading import DraftParams, ModelParams, load_draft
from jaxspec.trees.tree import pack_bits
from tests.parity.checks import Case, Mismatch, load_case
from tests.parity.checks.eagle import NUM_PAGES, PAGE_SIZE, context


def check_target(folder: Path) -> float:
    """Forward and greedy continuation, and that both spellings of config.json give the same model."""
    case, params = load_case(folder), jaxspec.load(folder, dtype=jnp.float32)
    worst = 0.0
    for prompt in "ab":
        out = jaxspec.forward(params, case.arrays[f"{prompt}.input_ids"])
        for name in ("logits", "hidden_states", "final_norm"):
            worst = max(worst, case.compare(f"{prompt}.{name}", getattr(out, name)))
    prompt, expected = case.arrays["greedy.prompt_ids"].tolist(), case.arrays["greedy.new_ids"]
    answer = jaxspec.generate(params, prompt, algorithm="none", max_new_tokens=len(expected), ignore_eos=True)
    case.compare("greedy.new_ids", np.array(answer.tokens))
    with tempfile.TemporaryDirectory() as other:
        shutil.copy(folder / "config_transformers5.json", Path(other) / "config.json")
        if hf_config.read_config(Path(other)) != dataclasses.replace(params.config, num_mtp_layers=0):
            raise Mismatch("config_transformers5.json gives another model than config.json")
    return worst


def load_hybrid(folder: Path) -> tuple[ModelParams, DraftParams]:
    """Qwen3-Next: the MTP layer, and of the target what it needs: configuration, embedding and head."""
    config = mtp.qwen3_next(json.loads((folder / "config.json").read_text()))
    tensors = open_tensors(folder)
    embedding, head = (jnp.asarray(tensors.read(n), jnp.float32) for n in ("model.embed_tokens.weight", "lm_head.weight"))
    tree = {"embedder": {"embedding": embedding}, "head": {"kernel": head.T}}
    return ModelParams(tree, config), load_draft(folder, config, dtype=jnp.float32)


def check_mtp(folder: Path) -> float:
    """The target where it can run; prefill, chained steps, a tree level and the catch-up step of the MTP layer."""
    case = load_case(folder)
    if mtp.has_hybrid_mtp(folder):
        target, draft = load_hybrid(folder)
        worst = 0.0
    else:
        target = jaxspec.load(folder, dtype=jnp.float32)
        draft = target.drafts["mtp"]
        out = jaxspec.forward(target, case.arrays["main.token_ids"])
        got = {"logits": out.logits, "hidden": out.final_norm, "raw_hidden": out.hidden_states[-1]}
        worst = max(case.compare(f"main.{name}", array) for name, array in got.items())
        start = len(case.arrays["prompt_ids"])
        case.compare("greedy", np.argmax(out.logits[start - 1 : -1], -1), case.arrays["main.token_ids"][start:])
    return max(worst, Steps(case, target, draft).check())


@partial(jax.jit, static_argnums=0)
def run_layer(drafter: MtpDrafter, tree, ctx, tokens, hidden, pool, positions, entries, visible) -> mtp_model.Step:
    """Layer 0 over pairs behind the committed ones."""
    valid = jnp.ones(tokens.shape, bool)
    return drafter.run(tree, ctx, 0, tokens, hidden, pool, ctx.cache.length, positions, valid, entries, visible)


@partial(jax.jit, static_argnums=0)
def draft_chain(drafter: MtpDrafter, tree, begin, ctx, tokens, following, features) -> jax.Array:
    """The tree that the drafter proposes behind a prompt taken in at once."""
    state = drafter.init(tree, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32)
    state = drafter.prefill(tree, state, begin, tokens, following, features, jnp.full(1, tokens.shape[1]))
    return drafter.propose(tree, state, ctx).tree.tokens


class Steps:
    """One MTP layer of a case, run over a paged cache as the drafter does."""

    def __init__(self, case: Case, target: ModelParams, draft: DraftParams):
        self.case, self.target, self.draft = case, target, draft
        self.prompt, self.length = case.arrays["prompt_ids"], len(case.arrays["prompt_ids"]) - 1

    def drafter(self, **changes) -> MtpDrafter:
        """A drafter without MiMo's zero embedding, unless asked for: most arrays are without it."""
        config: MtpConfig = dataclasses.replace(self.draft.config, **{"zero_first_embedding": False} | changes)
        return MtpDrafter(config, num_steps=3, topk=1, num_draft_tokens=4)

    def run(self, tokens, hidden, pool, base: int, positions, *, entries=None, visible=None, **changes) -> mtp_model.Step:
        """Pairs behind `base` committed ones."""
        drafter, ctx = self.drafter(**changes), context(self.target, base, self.prompt)
        if pool is None:
            pool = drafter.init(self.draft.tree, 1, NUM_PAGES, PAGE_SIZE, 64, jnp.float32).layers[0]
        entries = None if entries is None else jnp.asarray(entries)[None]
        return run_layer(
            drafter,
            self.draft.tree,
            ctx,
            jnp.asarray(tokens)[None],
            jnp.asarray(hidden)[None],
            pool,
            jnp.asarray(positions)[None],
            entries,
            visible,
        )

    def logits(self, normed) -> jax.Array:
        """The target's head on a normed state."""
        tree, config = self.target.tree, self.target.config
        return mtp_model.logits(self.draft.tree, self.draft.config, 0, tree, config, normed)

    def compare(self, group: str, out: mtp_model.Step) -> float:
        """All arrays of one step."""
        got = {"logits": self.logits(out.normed), "state_normed": out.normed, "state_raw": out.raw}
        return max(self.case.compare(f"{group}.{name}", array[0]) for name, array in got.items())

    def check(self) -> float:
        """Every group of arrays of the case; then the drafter itself must draft the same chain."""
        a, P = self.case.arrays, self.length
        features = a["main.hidden"]
        self.case.compare("prefill.token_ids", self.prompt[1:])
        prefill = self.run(self.prompt[1:], features[:P], None, 0, a["prefill.positions"])
        worst = self.compare("prefill", prefill)
        last = self.logits(prefill.normed)[0, -1]
        for kind in ("normed", "raw"):
            worst = max(worst, self.check_chain(kind, prefill))

        k = len(a["level1.token_ids"])
        children = jax.lax.top_k(last, k)[1]
        self.case.compare("level1.token_ids", children)
        out = self.run(
            children,
            jnp.repeat(prefill.normed[0, -1:], k, 0),
            prefill.cache,
            P,
            a["level1.positions"],
            entries=a["level1.positions"],
            visible=pack_bits(jnp.eye(k, dtype=bool)[None]),
        )
        worst = max(worst, self.compare("level1", out))

        self.case.compare("extend.hidden", features[P : P + len(a["extend.hidden"])])
        self.case.compare("extend.token_ids", a["main.token_ids"][P + 1 :][: len(a["extend.token_ids"])])
        # The pool of the tree level: what it left behind the committed pairs must be overwritten.
        out = self.run(a["extend.token_ids"], a["extend.hidden"], out.cache, P, a["extend.positions"])
        worst = max(worst, self.compare("extend", out))
        if "prefill_zero0.logits" in a:
            zeroed = self.run(self.prompt[1:], features[:P], None, 0, a["prefill.positions"], zero_first_embedding=True)
            worst = max(worst, self.compare("prefill_zero0", zeroed))
        return worst

    def check_chain(self, kind: str, prefill: mtp_model.Step) -> float:
        """Steps 2 and 3 of a chain that feeds back the state `kind`; `MtpDrafter.propose` must give the same chain."""
        a, P, out, worst = self.case.arrays, self.length, prefill, 0.0
        first_token = np.argmax(self.logits(prefill.normed)[0, -1])
        chain = [self.prompt[P], first_token]
        for step in (2, 3):
            group = f"chain_{kind}{step}"
            self.case.compare(f"{group}.token_ids", chain[-1:])
            positions = a[f"{group}.positions"]
            entries = np.arange(P, P + step - 1)
            self.case.compare(f"{group}.positions", entries[-1:])
            visible = pack_bits(jnp.ones((1, 1, step - 1), bool))
            hidden = (out.normed if kind == "normed" else out.raw)[0, -1:]
            out = self.run(chain[-1:], hidden, out.cache, P, positions, entries=entries, visible=visible)
            worst = max(worst, self.compare(group, out))
            chain.append(np.argmax(self.logits(out.normed)[0, -1]))

        if kind == "raw" and self.draft.config.layers.moe is not None:
            return worst  # the drafter's way of feeding it back is checked with the family that compiles fastest
        drafter, ctx = self.drafter(recycle_normed=kind == "normed"), context(self.target, P, self.prompt)
        begin = dataclasses.replace(ctx, cache=dataclasses.replace(ctx.cache, length=jnp.zeros(1, jnp.int32)))
        tokens, following = jnp.asarray(self.prompt[None, :P]), jnp.asarray(self.prompt[None, P:])
        features = jnp.asarray(a["main.hidden"][None, :P])
        drafted = draft_chain(drafter, self.draft.tree, begin, ctx, tokens, following, features)
        self.case.compare(f"propose ({kind})", drafted[0], np.array(chain))
        return worst
