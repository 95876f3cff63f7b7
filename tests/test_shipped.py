"""Shipped heads: found, fitted to the target, read when needed, chosen by what was measured, packed into the wheel."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, DraftParams, EagleOptions, ModelParams, SpecConfig, loading, shipped
from jaxspec.conversion import store
from jaxspec.conversion.mapping import flatten
from jaxspec.drafters import registry
from jaxspec.drafters.measured import Measurement, best, preference, with_measured_tree
from jaxspec.drafters.mtp.config import MtpConfig
from jaxspec.models.decoder import init_params
from tests.conversion.gguf_files import write_gguf
from tests.drafters.eagle_cases import FIXTURES

ROOT = Path(__file__).parents[1]
NAME = "smollm2-135m"


def row(head, platform, tree, accept_length, speedup):
    steps, topk, nodes = tree
    return {
        "model": NAME,
        "head": head,
        "platform": platform,
        "device": "test",
        "num_steps": steps,
        "topk": topk,
        "num_draft_tokens": nodes,
        "accept_length": accept_length,
        "speedup": speedup,
    }


ROWS = [
    row("eagle3", "cpu", (2, 1, 3), 1.5, 1.2),
    row("eagle3", "cpu", (3, 2, 6), 2.0, 1.7),
    row("eagle3", "gpu", (5, 4, 8), 2.5, 0.9),
    row("eagle", "cpu", (2, 2, 4), 1.4, 1.1),
    row("eagle", "gpu", (2, 2, 5), 1.4, 1.3),
    row("standalone", "cpu", (2, 1, 3), 1.4, 0.5),
]


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """A demo model of 14 tokens with two trained heads and a student, all stored in eight bits."""
    file = tmp_path / "demo.gguf"
    write_gguf("target_llama_smallvocab", file)
    monkeypatch.setattr(loading, "demo_file", lambda name: file)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    monkeypatch.setattr(shipped, "ROOTS", (tmp_path / "absent", folder))
    target = jaxspec.load(FIXTURES / "target_llama_smallvocab", dtype="float32")
    for name, source in (("eagle3", "e2e_eagle3"), ("eagle", "e2e_eagle2")):
        head = jaxspec.load_draft(FIXTURES / source, target, dtype="float32")
        store.write_folder(folder / f"{NAME}-{name}", head.config, head.tree, {}, quantize="int8")
    small = jaxspec.ModelConfig("llama", target.config.vocab_size, 16, 1, 2, 1, 8, 32, 256)
    tree = init_params(small, jax.random.key(0))
    store.write_folder(folder / f"{NAME}-standalone", small, tree, {}, quantize="int8")
    (folder / "measured.json").write_text(json.dumps({"rows": ROWS}))
    return folder


def generate(params, **options):
    return jaxspec.generate(params, [3, 1, 4, 1, 5], max_new_tokens=24, ignore_eos=True, **options)


LIMITS = {"eagle3": 7.6, "dspark": 6.3, "dflash": 7.0, "uno": 2.5, "eagle": 4.3, "mtp": 4.3}
"""Megabytes that a shipped head may take."""


def test_what_ships_is_small_and_in_few_files():
    folders = shipped.folders(NAME)
    assert set(folders) == set(LIMITS)
    sizes = {name: [f.stat().st_size for f in folder.rglob("*") if f.is_file()] for name, folder in folders.items()}
    assert all(sum(sizes[name]) <= LIMITS[name] * 1e6 and len(sizes[name]) < 20 for name in LIMITS), sizes
    assert sum(map(sum, sizes.values())) < 28e6


def test_the_demo_model_comes_with_its_heads(heads, monkeypatch):
    reads = []
    monkeypatch.setattr(store, "load", lambda *a, load=store.load: reads.append(a[0].parent.name) or load(*a))
    params = jaxspec.load(NAME, dtype="float32")
    assert list(params.drafts) == ["eagle", "eagle3", "standalone"]
    assert not any(draft.is_read for draft in params.drafts.values())
    assert "eagle, eagle3, standalone" in repr(params) and "read when first used" in repr(params.drafts["eagle3"])
    assert isinstance(params.drafts["standalone"], ModelParams) and params.drafts["standalone"].tokenizer is params.tokenizer
    plain = generate(params, algorithm="none")
    del reads[:]
    result = generate(params)
    assert reads == [f"{NAME}-eagle3"], "only the head that is used is read, once"
    assert result.tokens == plain.tokens and result.stats.algorithm == "EAGLE3" and result.stats.accept_length > 1
    assert "parameters, float32" in repr(params.drafts["eagle3"])
    for name in ("eagle", "standalone"):
        again = generate(params, algorithm=name)
        assert again.tokens == plain.tokens and again.stats.algorithm == name.upper()


def test_heads_are_leaves_of_the_model(heads):
    params = jaxspec.load(NAME, dtype="float32")
    moved = jax.tree.map(lambda x: x, params)
    again = jax.tree.map(lambda a, b: np.array_equal(a, b), params, moved)
    assert all(jax.tree.leaves(again)) and isinstance(moved.drafts["eagle3"], DraftParams)
    assert moved.drafts["eagle3"].measured == params.drafts["eagle3"].measured != ()
    assert generate(moved).tokens == generate(params).tokens


def test_a_head_is_found_by_its_algorithm(heads):
    draft = jaxspec.load_draft(NAME, algorithm="eagle3", dtype="float32")
    own = jaxspec.load(NAME, dtype="float32").drafts["eagle3"]
    assert all(np.array_equal(a, flatten(own.tree)[p]) for p, a in flatten(draft.tree).items())
    with pytest.raises(ConfigError, match="is a draft for STANDALONE"):
        jaxspec.load_draft(NAME, algorithm="dflash")


def test_heads_of_another_vocabulary_are_left_out(heads, tmp_path):
    write_gguf("target_llama", tmp_path / "demo.gguf")
    params = jaxspec.load(NAME)
    assert params.drafts == {} and generate(params).stats.algorithm == "NGRAM"


def test_without_heads_nothing_changes(heads):
    shutil.rmtree(heads)
    assert shipped.root() is None and jaxspec.load(NAME).drafts == {}
    assert jaxspec.load(FIXTURES / "target_llama_smallvocab").drafts == {}


def test_what_was_measured_settles_head_and_tree(heads, monkeypatch):
    params = jaxspec.load(NAME, dtype="float32")

    def automatic(spec=SpecConfig(), algorithm="auto"):  # noqa: B008 (frozen)
        name, draft = registry.choose(algorithm, params, None)
        found = registry.resolve(name, spec, params.config, draft)
        return name, (found.num_steps, found.topk, found.num_draft_tokens)

    assert automatic() == ("EAGLE3", (3, 2, 6))
    assert automatic(algorithm="eagle") == ("EAGLE", (2, 2, 4))
    assert automatic(SpecConfig(4, 1, 5)) == ("EAGLE3", (4, 1, 5)), "what the user asks for wins"
    assert automatic(SpecConfig(use_rejection_sampling=True)) == ("EAGLE3", (3, 1, 4)), "chains only: the general default"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert automatic() == ("EAGLE", (2, 2, 5))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert automatic() == ("EAGLE3", (5, 4, 8)), "not measured here: the longest accept length, the general tree"


def test_the_rules_for_drafts_without_figures():
    draft = DraftParams({}, None)
    assert preference(draft) == preference(None) == (0.0, 0.0) and best(()) is None
    assert with_measured_tree(SpecConfig(), draft) == with_measured_tree(SpecConfig(), None) == SpecConfig()
    chain = DraftParams({}, None, "", (Measurement(jax.default_backend(), 4, 1, 5, 2.0, 1.5),))
    assert with_measured_tree(SpecConfig(use_rejection_sampling=True), chain).num_steps == 4
    assert with_measured_tree(SpecConfig(options=EagleOptions(static_tree="0")), chain).num_steps is None


def test_eagle_means_mtp_layers_only_where_there_is_no_eagle_head(heads):
    params = jaxspec.load(NAME, dtype="float32")
    mtp = DraftParams({}, MtpConfig(params.config, "mimo"))
    both = ModelParams(params.tree, params.config, None, {"mtp": mtp, **params.drafts})
    assert registry.choose("eagle", both, None)[0] == "EAGLE"
    alone = ModelParams(params.tree, params.config, None, {"mtp": mtp})
    assert registry.choose("eagle", alone, None) == ("NEXTN", mtp)


def test_the_wheel_holds_them(heads, tmp_path):
    """Built from a copy with a head in ``checkpoints/``; unpacked elsewhere, the head is found there."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools, which a test environment has (.[test])")
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxspec", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(heads, source / "checkpoints")
    (source / "checkpoints" / f"{NAME}-eagle3" / "README.md").write_text("card")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for file in (source / "checkpoints").rglob("*"):
        if file.is_file():
            packed = site / "jaxspec" / "checkpoints" / file.relative_to(source / "checkpoints")
            assert packed.read_bytes() == file.read_bytes()
    modules = {str(p.relative_to(ROOT)) for name in ("jaxspec", "pallas_kernels") for p in (ROOT / name).rglob("*.py")}
    assert all((site / name).exists() for name in modules)
    code = f"from jaxspec import shipped; print(*shipped.folders('{NAME}'), shipped.root())"
    found = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["eagle", "eagle3", "standalone", str(site / "jaxspec" / "checkpoints")]


def test_a_clone_is_looked_at_after_the_package():
    package = Path(jaxspec.__file__).resolve().parent
    assert [*shipped.ROOTS] == [package / "checkpoints", package.parent / "checkpoints"]
