"""The mapping engine: coverage in both directions, exact inverses, casts."""

from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import ModelConfig
from jaxspec.conversion.mapping import (
    COPY,
    TRANSPOSE,
    Ignored,
    Rule,
    build,
    cast,
    check,
    concatenate,
    expected_shapes,
    flatten,
    shifted,
    stack,
    table,
    unbuild,
    unflatten,
)
from jaxspec.conversion.targets import gguf, hf
from jaxspec.files.errors import ConversionError
from jaxspec.files.readers import TensorInfo


class Tensors:
    def __init__(self, **tensors):
        self.tensors = tensors
        self.info = {n: TensorInfo(a.shape, a.dtype, "some.file") for n, a in tensors.items()}
        self.reads = []

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


SHAPES = {"a": {"kernel": (3, 4)}, "b": {"scale": (5,)}}
RULES = [Rule("a/kernel", ("w",), TRANSPOSE), Rule("b/scale", ("s",), COPY)]
GOOD = dict(w=np.arange(12.0, dtype=np.float32).reshape(4, 3), s=np.ones(5, np.float32))


def test_build_and_back():
    tensors = Tensors(**GOOD)
    check(RULES, SHAPES, tensors)
    assert tensors.reads == []
    stream = build(RULES, tensors)
    path, kernel = next(stream)
    assert (path, tensors.reads) == ("a/kernel", ["w"])  # one parameter at a time
    assert np.array_equal(kernel, GOOD["w"].T) and kernel.flags.c_contiguous and kernel.flags.writeable
    back = dict(unbuild(RULES, {path: kernel, **dict(stream)}))
    assert all(np.array_equal(back[n], a) for n, a in GOOD.items())


@pytest.mark.parametrize(
    "rules, tensors, message",
    [
        (RULES, dict(w=GOOD["w"]), r"missing tensor s \(shape \(5,\)\), needed for b/scale"),
        (RULES, dict(GOOD, more=np.ones(2)), r"extra tensor more \(shape \(2,\), in some.file\) that nothing uses"),
        (RULES, dict(GOOD, w=np.ones((3, 4))), r"tensor w has shape \(3, 4\), expected \(4, 3\) for a/kernel"),
        (RULES[:1], dict(w=GOOD["w"]), "parameter b/scale is filled by no tensor"),
        ([*RULES, Rule("c", ("s",), COPY)], GOOD, "the table fills c, which the model does not have"),
        ([*RULES, RULES[1]], GOOD, "parameter b/scale is filled twice"),
        ([RULES[0], Rule("b/scale", ("s", "w"), COPY)], GOOD, "takes 1 tensors, the table names 2"),
        ([RULES[0], Rule("b/scale", ("w",), COPY)], GOOD, "tensor w is used twice: for a/kernel and b/scale"),
    ],
)
def test_check_names_what_is_wrong(rules, tensors, message):
    with pytest.raises(ConversionError, match=message):
        check(rules, SHAPES, Tensors(**tensors))


def test_ignored_tensors():
    tensors = Tensors(**GOOD, copy=GOOD["s"], buffer=np.ones(1))
    ignored = [Ignored("copy", "is s again", same_as="s"), Ignored("buf+er", "a buffer")]
    check(RULES, SHAPES, tensors, ignored)
    assert "(left out) copy: is s again" in table(RULES, SHAPES, tensors, ignored)
    with pytest.raises(ConversionError, match="tensor copy differs from s, but: is s again"):
        check(RULES, SHAPES, Tensors(**GOOD, copy=GOOD["s"] + 1), ignored)
    with pytest.raises(ConversionError, match="extra tensor xbuffer"):
        check(RULES, SHAPES, Tensors(**GOOD, xbuffer=np.ones(1)), ignored)


def test_table_has_a_line_per_parameter():
    text = table(RULES, SHAPES, Tensors(**GOOD), dtype=ml_dtypes.bfloat16)
    assert text.splitlines()[0] == "a/kernel [3, 4] bfloat16  ←  transpose(w [4, 3] float32)"


def config_of(heads, groups, dim, layers=1):
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=6,
        num_layers=layers,
        num_heads=heads * groups,
        num_kv_heads=heads,
        head_dim=dim,
        ffn_size=10,
        max_positions=16,
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4]), st.integers(0, 4))
def test_every_transform_is_inverted_by_its_split(heads, groups, dim, which):
    config = config_of(heads, groups, dim)
    width = (config.num_heads + 2 * heads) * dim
    transform, shape = [
        (hf.fuse_qkv(config), (6, width)),
        (hf.regroup_qkv(config), (6, width)),
        (gguf.unpermuted_qkv(config), (6, width)),
        (stack(concatenate(3, 3), heads), (heads, 4, 6)),
        (shifted(TRANSPOSE, 1.0), (heads, dim)),
    ][which]
    parameter = np.random.default_rng(0).integers(0, 99, shape).astype(np.float32)
    parts = transform.split(parameter)
    assert np.array_equal(transform.join(parts), parameter)
    rule = Rule("x", tuple(str(i) for i in range(len(parts))), transform)
    assert expected_shapes(rule, shape) == [p.shape for p in parts]


def test_fused_projection_is_laid_out_per_kv_head():
    from pallas_kernels.layer.api import split_qkv

    config = config_of(2, 3, 4)
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(heads * 4, 6)).astype(np.float32) for heads in (6, 2, 2)]
    kernel, x = hf.fuse_qkv(config).join(weights), rng.normal(size=(1, 2, 6)).astype(np.float32)
    y = jnp.asarray(x @ kernel)
    for got, weight in zip(split_qkv(y, config.num_kv_heads, config.head_dim), weights, strict=True):
        np.testing.assert_allclose(got.reshape(1, 2, -1), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_casts_keep_integers_and_correction_biases():
    half = ml_dtypes.bfloat16
    assert cast("a/kernel", np.ones(2, np.float32), half).dtype == half
    assert cast("a/kernel", np.ones(2, half), None).dtype == half
    assert cast("a/ids", np.ones(2, np.int64), half).dtype == np.int64
    assert cast("router/correction_bias", np.ones(2, half), half).dtype == np.float32


def test_flatten_and_unflatten():
    tree = {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert flatten(tree) == {"a/b/c": 1, "a/d": 2, "e": 3} and unflatten(flatten(tree)) == tree


def test_prefixes_of_wrapped_models():
    for prefix, head in (
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ):
        assert hf.find_prefix(SimpleNamespace(info={f"{prefix}embed_tokens.weight": None, "x": None})) == (prefix, head)
