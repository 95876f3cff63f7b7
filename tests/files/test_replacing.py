"""No conversion destroys its source, and whatever moment it is killed at, the old folder or the new one is there."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import jaxspec
from jaxspec.conversion import ConversionError, convert
from jaxspec.files import replacing
from tests.files.archives import FIXTURES

MODEL = "target_llama_tied"


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def linked(link, to):
    link.symlink_to(to, target_is_directory=True)
    return link


def through_dots(at):
    return at / "model", at / "model" / "drafts" / ".." / ".." / "model"


def files_that_are_links(at):
    """The layout of the hub's cache: a folder of links, the files elsewhere."""
    (at / "snapshot").mkdir()
    for file in (at / "model").iterdir():
        if file.is_file():
            (at / "snapshot" / file.name).symlink_to(file)
    return at / "snapshot", at / "model"


PLACES = {
    "a link to the goal": lambda at: (linked(at / "link", at / "model"), at / "model"),
    "a link as the goal": lambda at: (at / "model", linked(at / "link", at / "model")),
    "links on both sides": lambda at: (linked(at / "one", at / "model"), linked(at / "two", at / "model")),
    "a link of a link": lambda at: (linked(at / "two", linked(at / "one", at / "model")), at / "model"),
    "a link above": lambda at: (linked(at.parent / f"{at.name}-link", at) / "model", at / "model"),
    "the goal above a link": lambda at: (linked(at / "model" / "again", at / "model"), at),
    "dots": through_dots,
    "goal with dots": lambda at: through_dots(at)[::-1],
    "goal that ends in dots": lambda at: (at / "model", at / "model" / ".."),
    "a part of the source": lambda at: (at / "model", at / "model" / "drafts"),
    "a link inside the source": lambda at: (at / "model", linked(at / "model" / "out", at.parent)),
    "files that are links": files_that_are_links,
    "the folder above": lambda at: (at / "model", at),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_source_survives(name, tmp_path):
    at = tmp_path / "here"
    shutil.copytree(FIXTURES / MODEL, at / "model")
    (at / "model" / "drafts").mkdir()
    source, goal = PLACES[name](at)
    before = content(at / "model")
    with pytest.raises(ConversionError, match="is or holds the source itself"):
        convert(source, goal, force=True, progress=False)
    assert content(at / "model") == before and jaxspec.load(source).config.family == "llama"


def test_names_that_differ_in_case_only(tmp_path, monkeypatch):
    """On a file system that does not tell case apart two spellings are one place; here `samefile` plays it."""
    shutil.copytree(FIXTURES / MODEL, tmp_path / "model")
    monkeypatch.setattr(os.path, "lexists", lambda p: Path(str(p).lower()).exists())
    monkeypatch.setattr(os.path, "samefile", lambda a, b: str(a).lower() == str(b).lower())
    with pytest.raises(ConversionError, match="is or holds the source itself"):
        convert(tmp_path / "model", tmp_path / "MODEL", force=True, progress=False)
    assert (tmp_path / "model" / "config.json").exists()


def test_the_target_of_a_head_survives(tmp_path):
    shutil.copytree(FIXTURES / "draft_eagle3_llama", tmp_path / "head")
    shutil.copytree(FIXTURES / "target_llama", tmp_path / "target")
    with pytest.raises(ConversionError, match="is or holds the source itself"):
        convert(tmp_path / "head", tmp_path / "target", target=tmp_path / "target", force=True, progress=False)
    assert content(tmp_path / "target") == content(FIXTURES / "target_llama")


def test_a_link_elsewhere_is_replaced_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    linked(tmp_path / "out", tmp_path / "other")
    linked(tmp_path / "dangling", tmp_path / "nowhere")
    for name in ("out", "dangling"):
        with pytest.raises(ConversionError, match="exists; pass force=True"):
            convert(FIXTURES / MODEL, tmp_path / name, progress=False)
        convert(FIXTURES / MODEL, tmp_path / name, force=True, progress=False)
        assert not (tmp_path / name).is_symlink() and (tmp_path / name / "config.json").exists()
    assert (tmp_path / "other" / "precious").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "other", "out"]


KILLED = """
import os, sys
from pathlib import Path
from jaxspec.files import replacing
calls = step = 0
def alive():
    global calls
    calls += 1
    if calls == step:
        os._exit(9)
def dying(call):
    def wrapped(*arguments, **options):
        alive()
        return call(*arguments, **options)
    return wrapped
for module, name in ((os, "rename"), (replacing.shutil, "rmtree"), (replacing.tempfile, "mkdtemp"), (Path, "chmod")):
    setattr(module, name, dying(getattr(module, name)))
code = 9
while code:
    step += 1
    out = Path(sys.argv[1], str(step), "out")
    out.mkdir(parents=True)
    (out / "model").write_text("old")
    if not (child := os.fork()):
        with replacing.replacing(out, True) as folder:
            (folder / "model").write_text("complete")
            alive()
        os._exit(0)
    code = os.waitpid(child, 0)[1]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_any_step(tmp_path):
    """A run is killed before each call that changes something; the next one finds a whole folder and tidies up."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    seen = []
    for at in sorted(tmp_path.iterdir(), key=lambda p: int(p.name)):
        left = len(list(at.glob(".out-*")))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            replacing.tidy(at / "out")
        assert [p.name for p in at.iterdir()] == ["out"] and len(said) == left
        seen.append(((at / "out" / "model").read_text(), left))
    assert seen[0] == ("old", 0) and seen[-1] == ("complete", 0)
    assert {("old", 1), ("old", 2), ("complete", 1)} <= set(seen)


def test_leftovers_are_told_from_what_is_being_written(tmp_path):
    out = tmp_path / "out"
    with replacing.replacing(out, False) as first:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replacing.tidy(out)
        assert first.exists()
    (tmp_path / ".out-partial-abc").mkdir()
    (tmp_path / ".output-partial-abc").mkdir()  # of another name
    with pytest.warns(UserWarning, match=r"\.out-partial-abc was left by a run that was killed: it is removed"):
        convert(FIXTURES / MODEL, out, force=True, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".output-partial-abc", "out"]


def test_what_a_killed_run_moved_away_is_back_and_counts_as_existing(tmp_path):
    shutil.copytree(FIXTURES / MODEL, tmp_path / ".out-old-abc" / "folder")
    with (
        pytest.warns(UserWarning, match="out was moved away by a run that was killed: it is back"),
        pytest.raises(ConversionError, match="out exists; pass force=True"),
    ):
        convert(FIXTURES / "target_qwen3", tmp_path / "out", progress=False)
    assert content(tmp_path / "out") == content(FIXTURES / MODEL)


def test_a_leftover_that_is_the_source_stays(tmp_path):
    source = shutil.copytree(FIXTURES / MODEL, tmp_path / ".out-old-abc" / "folder")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", force=True, progress=False)
    assert content(source) == content(FIXTURES / MODEL)


def test_a_failing_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    out, rename, calls = tmp_path / "out", os.rename, []
    out.mkdir()
    (out / "model").write_text("old")

    def failing(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise OSError("no rename")
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no rename"), replacing.replacing(out, True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (out / "model").read_text() == "old"
