"""Trained heads in published formats, read by their names with numpy: the logits are those of our drafters (MTP, UNO).

Only names and shapes of the published formats and papers are used here, none of the package's own code: MiMo's MTP layer
([hidden; embedding], then a Qwen2 layer) and PEFT's LoRA (x·Aᵀ·Bᵀ·alpha/r beside a product, on the rows that draft).
"""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import train as command
from jaxspec.conversion import convert
from jaxspec.drafters.mtp import model as mtp_model
from jaxspec.drafters.uno import model as uno_model
from jaxspec.files.errors import MissingFileError
from jaxspec.files.folders import open_tensors
from jaxspec.hub import demo_file
from jaxspec.models import decoder
from jaxspec.models.attend import causal_attend
from tests.drafters.eagle_cases import FIXTURES

TARGET = FIXTURES / "target_llama_smallvocab"


class Published:
    """Tensors by name (those of a folder, or given), in float64, and the arithmetic of a Llama layer over them."""

    def __init__(self, tensors: Path | dict, config: dict, adapter: Path | None = None):
        if isinstance(tensors, Path):
            stored = open_tensors(tensors)
            tensors = {name: stored.read(name) for name in stored.info}
        self.w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        self.c, self.lora, self.scale = config, {}, 0.0
        if adapter is not None:
            pairs, about = open_tensors(adapter), json.loads((adapter / "adapter_config.json").read_text())
            self.lora = {name: np.asarray(pairs.read(name), np.float64) for name in pairs.info}
            self.scale = about["lora_alpha"] / about["r"]

    def rms(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, x, name, gate=None):
        y = x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)
        a, b = (self.lora.get(f"base_model.model.{name}.lora_{half}.weight") for half in "AB")
        return y if a is None or gate is None else y + gate[:, None] * (x @ a.T @ b.T) * self.scale

    def rotated(self, x, positions):
        half = x.shape[-1] // 2
        angle = positions[:, None] * self.c["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    def layer(self, x, name, gate=None):
        T, H, K = len(x), self.c["num_attention_heads"], self.c["num_key_value_heads"]
        at, positions = f"{name}.self_attn", np.arange(T)
        y = self.rms(x, f"{name}.input_layernorm")
        q, k, v = (self.linear(y, f"{at}.{p}_proj", gate).reshape(T, n, -1) for p, n in (("q", H), ("k", K), ("v", K)))
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = np.repeat(k, H // K, 1), np.repeat(v, H // K, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(T, -1)
        x = x + self.linear(out, f"{at}.o_proj", gate)
        y = self.rms(x, f"{name}.post_attention_layernorm")
        up = self.linear(y, f"{name}.mlp.gate_proj", gate)
        up = up / (1 + np.exp(-up)) * self.linear(y, f"{name}.mlp.up_proj", gate)
        return x + self.linear(up, f"{name}.mlp.down_proj", gate)

    def model(self, tokens, gate=None):
        """(what the final norm gives, logits)"""
        x = self.w["model.embed_tokens.weight"][tokens]
        for i in range(self.c["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{i}", gate)
        x = self.rms(x, "model.norm")
        return x, self.head(x)

    def head(self, x):
        return x @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T


@pytest.fixture(scope="module")
def target():
    return jaxspec.load(TARGET, dtype="float32")


def keys(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def trained(head: str, folder: Path, *options: str) -> tuple[Path, Path]:
    """A head trained for a few steps, as its folder (eight bits) and as published."""
    line = f"{head} --target {TARGET} --steps 6 --lr 0.01 --tokens 500 --length 24 --rows 24 --batch 4 --held-out 4 --quiet"
    assert command.main([*line.split(), *options, "--quantize", "int8", "--out", str(folder / "own")]) == 0
    return folder / "own", convert(folder / "own", folder / "published", to_hf=True, progress=False)


def features(target, tokens):
    """The target's own pass: (final norm's output, logits)."""

    @jax.jit
    def run(tree):
        return decoded(tree, target.config, tokens)

    return run(target.tree)


def decoded(tree, config, tokens):
    positions = jnp.arange(len(tokens))[None]
    x = decoder.embed(tree, config, jnp.asarray(tokens)[None])
    hidden = decoder.decode(tree, config, x, positions, causal_attend(positions), (None,) * config.num_layers, ()).hidden
    return hidden, decoder.unembed(tree, config, hidden)


def test_the_target_itself(target):
    tokens = np.random.default_rng(0).integers(0, target.config.vocab_size, 17)
    logits = Published(TARGET, keys(TARGET)).model(tokens)[1]
    np.testing.assert_allclose(features(target, tokens)[1][0], logits, atol=1e-4)


def test_a_trained_mtp_layer(target, tmp_path, capsys):
    own, published = trained("mtp", tmp_path)
    theirs, layer = Published(TARGET, keys(TARGET)), Published(published, keys(published))
    tokens = np.random.default_rng(1).integers(0, target.config.vocab_size, 17)
    name = "model.mtp_layers.0"
    embedding = theirs.w["model.embed_tokens.weight"][np.roll(tokens, -1)]
    embedding[0] = 0  # engines zero the embedding at position 0
    hidden = theirs.model(tokens)[0]
    both = [layer.rms(hidden, f"{name}.hidden_layernorm"), layer.rms(embedding, f"{name}.token_layernorm")]
    x = layer.layer(layer.linear(np.concatenate(both, -1), f"{name}.input_proj"), name)
    expected = theirs.head(layer.rms(x, f"{name}.final_layernorm"))

    draft, positions = jaxspec.load_draft(own, target, dtype=jnp.float32), jnp.arange(len(tokens))[None]
    assert any(np.abs(layer.w[f"{name}.{n}.weight"] - 1).max() > 1e-3 for n in ("token_layernorm", "hidden_layernorm"))
    following = jnp.asarray(np.roll(tokens, -1))[None]
    e = mtp_model.embed(draft.tree, draft.config, target.tree, target.config, following, positions)
    found = mtp_model.step(
        draft.tree, draft.config, 0, e, features(target, tokens)[0], positions, causal_attend(positions), None
    )
    state = found.normed if draft.config.recycle_normed else found.raw
    logits = mtp_model.logits(draft.tree, draft.config, 0, target.tree, target.config, state)
    np.testing.assert_allclose(logits[0], expected, atol=1e-4)


def test_a_trained_uno_adapter(target, tmp_path, capsys):
    own, published = trained("uno", tmp_path, "--rank", "3")
    tokens = np.random.default_rng(2).integers(0, target.config.vocab_size, 17)
    gate = np.arange(17) >= 12  # rows of noise behind clean ones
    reference = Published(TARGET, keys(TARGET), published)
    expected, clean = reference.model(tokens, gate)[1], reference.model(tokens)[1]
    assert np.abs(expected - clean)[12:].max() > 1e-2 and np.abs(expected - clean)[:12].max() == 0

    draft = jaxspec.load_draft(own, target, dtype=jnp.float32)
    np.testing.assert_allclose(adapted_logits(target, draft, tokens, gate), expected, atol=1e-4)
    np.testing.assert_allclose(in_float64(adapted_logits, target, draft, tokens, gate), expected, atol=1e-9)


def adapted_logits(target, draft, tokens, gate):
    """Of our target with its adapter on in the rows that `gate` names."""

    @jax.jit
    def run(tree, adapter):
        both = uno_model.adapted(tree, adapter, draft.config.scale, jnp.asarray(gate)[None, :, None], draft.config)
        return decoded(both, target.config, tokens)[1]

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(target.tree, draft.tree)[0])


def in_float64(function, target, draft, *args):
    """The function with all parameters in float64, and float64 wherever the package asks for float32 (norms, angles, sums)."""

    def doubled(params):
        tree = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else np.asarray(x), dict(params.tree))
        return types.SimpleNamespace(config=params.config, tree=tree)

    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        models = doubled(target), doubled(draft)
        patch.setattr(jnp, "float32", jnp.float64)
        return function(*models, *args)


@pytest.mark.slow
def test_the_shipped_uno_adapter(tmp_path):
    """Thirty layers and logits up to 39: in float64 the same function, so what differs in float32 is rounding alone."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    try:
        file = demo_file("smollm2-135m")
    except MissingFileError as error:
        pytest.skip(str(error))
    target = jaxspec.load("smollm2-135m", dtype="float32")
    draft = target.drafts["uno"]
    adapter = convert(Path(draft.source), tmp_path / "published", to_hf=True, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    config = model.config.to_dict() | {"rope_theta": target.config.rope.theta}
    tokens = np.array(target.tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers and one lake."}]))
    tokens = np.append(tokens, [504, 1023, 88, 12, 77, 5, 900])  # rows of noise behind clean ones
    gate = np.arange(len(tokens)) >= len(tokens) - 7
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = Published(tensors, config, adapter).model(tokens, gate)[1]
    with torch.inference_mode():
        theirs = model(torch.tensor(tokens)[None]).logits[0].numpy()
    rounding = np.abs(theirs - Published(tensors, config).model(tokens)[1]).max()
    found = np.abs(adapted_logits(target, draft, tokens, gate) - expected).max()
    assert np.abs(in_float64(adapted_logits, target, draft, tokens, gate) - expected).max() < 1e-9
    assert found < 1e-4 and found < 4 * rounding, (found, rounding)  # torch's float32, without an adapter, is as far off
