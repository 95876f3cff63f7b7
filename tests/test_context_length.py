"""`context_length=` of `load`, and a context that a scaled rope makes longer, up to what is generated."""

import json
import shutil
import warnings

import pytest

import jaxspec
from jaxspec import ConfigError
from tests.files.archives import FIXTURES


def folder(path, positions: int, scaling=None):
    shutil.copytree(FIXTURES / "target_llama", path)
    keys = {"max_position_embeddings": positions, "rope_scaling": scaling, "rope_parameters": None, "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | keys))
    return path


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_prompt_may_be_as_long_as_the_scaled_context(kind, tmp_path):
    model = jaxspec.load(folder(tmp_path / "m", 16, {"rope_type": kind, "factor": 4.0}))
    answer = jaxspec.generate(model, [[5] * 60], max_new_tokens=20, ignore_eos=True)[0]
    assert len(answer.tokens) == 4
    with pytest.raises(ConfigError, match="the model's context holds 64"):
        jaxspec.generate(model, [[5] * 64])


@pytest.mark.parametrize("converted", [False, True])
def test_the_context_is_lowered_and_raised(converted, tmp_path):
    source = folder(tmp_path / "m", 32)
    if converted:
        jaxspec.convert(source, tmp_path / "converted")
        source = tmp_path / "converted"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jaxspec.load(source).config.max_positions == 32
        assert jaxspec.load(source, context_length=32).config.max_positions == 32
        short = jaxspec.load(source, context_length=8)
    assert len(jaxspec.generate(short, [[1, 2, 3, 4, 5]], max_new_tokens=20, ignore_eos=True)[0].tokens) == 3
    with pytest.warns(UserWarning, match="context_length=48 is more than the 32 positions that the model was made for"):
        long = jaxspec.load(source, context_length=48)
    assert len(jaxspec.generate(long, [[1] * 40], max_new_tokens=20, ignore_eos=True)[0].tokens) == 8


@pytest.mark.parametrize("value", [0, 1, -5, 2.5, "64", True])
def test_other_values_are_refused(value, tmp_path):
    with pytest.raises(ConfigError, match="context_length=.* must be a whole number of at least 2"):
        jaxspec.load(tmp_path, context_length=value)
