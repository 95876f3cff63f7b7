"""Which rows cuDNN attends for: head sizes and windows that it takes, on machines where a trial has shown that it works."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training import attention
from pallas_kernels.attention import cudnn, rows_reference


def rows(head_size: int):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, 24, heads, head_size), jnp.bfloat16) for key, heads in zip(keys, (4, 2, 2), strict=True)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("head_size", "fused"), [(16, True), (12, False), (136, False)])
def test_only_what_cudnn_takes_goes_there(monkeypatch, head_size, fused, window):
    """XLA's own attention stands in for cuDNN's; both take the same arguments."""
    asked, calls, plain = [], [], jax.nn.dot_product_attention
    monkeypatch.setattr(cudnn, "training_works", lambda windowed: asked.append(windowed) or True)

    def fake(*args, implementation, **options):
        calls.append(implementation)
        return plain(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    options = {"scale": 0.3, "window": window, "softcap": None}
    found, _ = attention.row_attend(None, *rows(head_size), **options)
    assert calls == ["cudnn"] * fused and asked == [window is not None] * fused
    q, *entries = rows(head_size)
    wanted = rows_reference.unrolled(q, [tuple(entries)], **options)
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("works", "what"),
    [
        (partial(cudnn.training_works.__wrapped__, windowed=False), "cuDNN's attention"),
        (partial(cudnn.training_works.__wrapped__, windowed=True), "cuDNN's sliding-window attention"),
        (cudnn.fused_blocks_work.__wrapped__, "cuDNN's masked attention"),
        (partial(cudnn.prefill_works.__wrapped__, jnp.dtype("float16"), 8, True), "cuDNN's sliding-window attention"),
    ],
)
def test_a_gpu_without_a_working_cudnn_is_told_why(monkeypatch, works, what):
    def broken(*args, **options):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", broken)
    with pytest.warns(UserWarning, match=rf"{what} does not work here.*\(RuntimeError: cuDNN is not detected"):
        assert works() is False


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(cudnn, "apart", None)  # nothing is tried out
    assert cudnn.training_works.__wrapped__(windowed=False) is False
    assert cudnn.prefill_works.__wrapped__(jnp.dtype("bfloat16"), 64, windowed=False) is False
    assert cudnn.fused_blocks_work.__wrapped__() is False
