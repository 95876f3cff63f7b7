"""The golden cases that ship with the tests, through the checks of `check_fixtures.py`, and the driver itself."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parity import check_fixtures
from tests.parity.checks import CHECKS, Mismatch, find_check, load_case

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/case.json"))
# Long, and of a kind of which a shorter case stays; CI runs check_fixtures.py over all of them.
LONG = {
    "draft_eagle2_llama",
    "draft_eagle31_sglang",
    "draft_eagle3_sglang",
    "draft_peagle",
    "draft_uno_qwen3",
    "mtp_deepseek_v3",
    "tree_eagle2",
    "verify_distributions",
}


def copy_case(name: str, folder: Path) -> Path:
    shutil.copytree(FIXTURES / name, folder / name)
    return folder / name


def change_array(case: Path, name: str, change) -> None:
    with np.load(case / "io.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    arrays[name] = change(arrays[name])
    np.savez(case / "io.npz", **arrays)


@pytest.mark.parametrize("name", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CASES])
def test_case(name):
    assert find_check(name) is not None, "the driver would skip it"
    passes, line = check_fixtures.check(FIXTURES / name)
    assert passes, line


def test_driver_prints_a_line_per_case(capsys):
    assert check_fixtures.main([str(FIXTURES), "--only", "verify_(greedy|chain)"]) == 0
    assert capsys.readouterr().out.splitlines() == ["verify_chain ok 0.0e+00", "verify_greedy_tree ok 0.0e+00"]


def test_driver_runs_from_anywhere(tmp_path):
    command = [sys.executable, check_fixtures.__file__, str(FIXTURES), "--only", "greedy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "verify_greedy_tree ok 0.0e+00\n"), done.stderr


@pytest.mark.parametrize(
    "name, array, change",
    [
        ("verify_greedy_tree", "n8.accepted", lambda a: a + (np.arange(len(a)) == 1)),
        ("verify_greedy_tree", "n8.accept_index", lambda a: a[:, ::-1]),
        ("verify_target_only", "ex0.predict", lambda a: np.where(a == a.max(), a + 1, a)),
        ("verify_target_only", "ex0.coins", lambda a: 1 - a),
        ("verify_chain", "ex1.block.accepted", lambda a: np.maximum(a - 1, 0)),
        ("verify_tree_builder", "k2s3n6.mask_qlen", lambda a: ~a),
        ("verify_tree_builder", "k4s4n8.mask_packed", lambda a: a ^ 1),
        ("verify_tree_builder", "k4s4n8.level1.tokens", lambda a: a[:, ::-1]),
        ("verify_distributions", "chain.q", lambda a: a[::-1]),
        ("verify_distributions", "tree.thr0.outcome_prob", lambda a: a[::-1]),
    ],
)
def test_corrupted_array_fails(name, array, change, tmp_path, capsys):
    change_array(copy_case(name, tmp_path), array, change)
    assert check_fixtures.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{name} FAIL Mismatch: ")


def test_changed_weights_fail(tmp_path, capsys):
    case = copy_case("target_llama_tied", tmp_path)
    weights = case / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-400:] = bytes(400)  # the last weights become zero
    weights.write_bytes(content)
    assert check_fixtures.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("target_llama_tied FAIL Mismatch: ")


def test_a_broken_file_fails_alone(tmp_path, capsys):
    (copy_case("verify_chain", tmp_path) / "io.npz").write_bytes(b"no archive")
    copy_case("verify_greedy_tree", tmp_path)
    assert check_fixtures.main([str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("verify_chain FAIL ") and second == "verify_greedy_tree ok 0.0e+00"


@pytest.mark.parametrize("pattern, target", CHECKS)
def test_registered_functions_exist(pattern, target):
    name, function = target.split(":")
    name = f"tests.parity.checks.{name}"
    assert callable(getattr(importlib.import_module(name), function))


def test_missing_and_misshapen_arrays_fail(tmp_path):
    case = copy_case("verify_greedy_tree", tmp_path)
    change_array(case, "n8.accepted", lambda a: a[:-1])
    with pytest.raises(Mismatch, match="n8.accepted"):
        load_case(case)


def test_case_without_a_check_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.parity.checks.CHECKS", ())
    copy_case("verify_greedy_tree", tmp_path)
    assert check_fixtures.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "verify_greedy_tree skipped (not built yet)\n"


@pytest.mark.parametrize("arguments, message", [(["--only", "no_such"], "matches none of"), (["--only", "("], "regular")])
def test_unknown_selection_is_an_error(arguments, message, capsys):
    assert check_fixtures.main([str(FIXTURES), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_cases_is_an_error(tmp_path, capsys):
    assert check_fixtures.main([str(tmp_path)]) == 2
    assert "no case folders" in capsys.readouterr().err
