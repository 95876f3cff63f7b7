"""A prompt's first chunk through cuDNN, against the kernel over the pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import generate
from jaxspec.benchmarking.shapes import random_tree
from jaxspec.config import ModelConfig
from jaxspec.engine.device import Device
from jaxspec.kvcache import init_layers
from jaxspec.models import decoder, paged
from jaxspec.params import ModelParams
from pallas_kernels.attention import cudnn

CONFIG = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    ffn_size=512,
    max_positions=4096,
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("windowed", [False, True])
def test_cudnn_works_here(head_dim, dtype, windowed):
    assert cudnn.prefill_works(jnp.dtype(dtype), head_dim, windowed)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("T", [700, 1024])
def test_fresh_chunk(T, window):
    config = dataclasses.replace(CONFIG, windows=(window, None))
    params = random_tree(decoder.param_shapes(config), 0, jnp.bfloat16)
    batch, width = 2, -(-T // 16)
    table = 1 + jnp.arange(batch * width).reshape(batch, width)
    valid = jnp.arange(T) < jnp.array([[T], [T // 2 + 3]])
    positions = jnp.broadcast_to(jnp.arange(T), (batch, T))
    tokens = jax.random.randint(jax.random.key(1), (batch, T), 0, config.vocab_size)

    def forward(fresh):
        pools = init_layers(2, 1 + batch * width, 16, 2, 128, 128, jnp.bfloat16)
        x = decoder.embed(params, config, tokens)
        out = paged.paged_forward(params, config, x, pools, table, jnp.zeros(batch, jnp.int32), positions, valid, fresh=fresh)
        return out.hidden, out.layers

    compiled = jax.jit(lambda: forward("cudnn")).lower().compile()
    assert compiled.as_text().count("__cudnn$fmhaSoftmax") >= 2
    (found, pools), (wanted, other) = compiled(), jax.jit(lambda: forward(None))()
    kept = np.asarray(valid)
    for a, b in ((found[kept], wanted[kept]), *zip(jax.tree.leaves(pools), jax.tree.leaves(other), strict=True)):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        start = 1 if a.ndim == 4 else 0  # behind the scratch page
        assert np.abs(a[start:] - b[start:]).max() <= 0.03 * np.abs(b[start:]).max()


def test_long_prompts_take_it_by_themselves(recwarn, monkeypatch):
    config = dataclasses.replace(CONFIG, max_positions=8192)
    params = ModelParams(random_tree(decoder.param_shapes(config), 0, jnp.bfloat16), config)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, 6000).tolist()
    long, run = [], Device._prefill
    monkeypatch.setattr(Device, "_prefill", lambda self, each, of: long.append(each.long) or run(self, each, of))
    answers = [
        generate(params, prompt, algorithm="none", max_new_tokens=4, ignore_eos=True, prefill_attention=name).tokens
        for name in ("auto", "cudnn", "auto")
    ]
    assert answers[0] == answers[1] == answers[2]
    assert long == [True] * 3
    assert not [w for w in recwarn if "cuDNN" in str(w.message)]
