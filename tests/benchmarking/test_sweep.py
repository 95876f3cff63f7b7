"""The sweep: which settings make sense, and that a table is resumed where it was left."""

from __future__ import annotations

import pytest

from jaxspec.benchmarking import sweep
from jaxspec.benchmarking.sweep import Setting
from jaxspec.config import ConfigError, SpecConfig, resolve_tree


def figures(setting: Setting) -> dict:
    return {
        "acc_length": 2.0,
        "step_time": 0.01 * setting.num_draft_tokens or 0.02,
        "tokens_per_second": 50.0,
        "completion_tokens": 64,
    }


def test_the_grid_holds_plain_decoding_and_only_trees_that_can_be_built():
    grid = sweep.settings()
    assert Setting(1, 0, 0, 0) in grid
    assert Setting(1, 3, 1, 4) in grid
    assert Setting(8, 5, 4, 16) in grid
    assert len(set(grid)) == len(grid)
    for setting in grid:
        zeros = [v == 0 for v in setting[1:]]
        assert all(zeros) or not any(zeros)
        if not setting.is_plain:
            assert setting.steps * setting.topk + 1 >= setting.num_draft_tokens
            spec = SpecConfig(*setting[1:])
            assert resolve_tree(spec, (3, 1, 4), "EAGLE") == spec
    chains = [s for s in grid if s.batch_size == 1 and s.topk == 1]
    assert {(s.steps, s.num_draft_tokens) for s in chains} == {(1, 2), (3, 4), (5, 6), (7, 8)}
    assert Setting(1, 1, 8, 16) not in grid


def test_a_table_is_resumed_row_by_row(tmp_path):
    path, seen = tmp_path / "sweep.csv", []
    grid = sweep.settings((1,), (0, 3), (0, 1, 2), (0, 4))

    def until_it_breaks(setting):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(setting)
        return figures(setting)

    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(path, "a", grid, until_it_breaks)
    assert sweep.finished(path, "a") == set(grid[:2])
    with path.open("a") as file:  # a crash in the middle of a row
        file.write("a,1,3,2,4,2.0")
    assert sweep.run_sweep(path, "a", grid, lambda s: seen.append(s) or figures(s)) == len(grid) - 2
    assert sorted(seen) == sorted(grid)
    assert sweep.run_sweep(path, "a", grid, figures) == 0
    assert sweep.run_sweep(path, "another model", grid[:1], figures) == 1
    rows = sweep.read_rows(path, "a")
    assert [Setting(*(r[n] for n in Setting._fields)) for r in rows] == grid
    assert sweep.best(rows)[1]["speed"] == max(r["speed"] for r in rows)


def test_settings_that_are_refused_are_named_and_left_out(tmp_path):
    said = []

    def refuse(setting):
        raise ConfigError("the pool is too large")

    assert sweep.run_sweep(tmp_path / "s.csv", "a", [Setting(2, 3, 1, 4)], refuse, said.append) == 0
    assert "3/1/4 at batch 2" in said[0]
    assert "pool" in said[0]


def test_a_file_of_another_kind_is_not_touched(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("name,price\nx,1\n")
    with pytest.raises(ConfigError, match="another file"):
        sweep.run_sweep(path, "a", [Setting(1, 0, 0, 0)], figures)
    assert path.read_text() == "name,price\nx,1\n"


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.csv"
    sweep.run_sweep(path, "a", sweep.settings((1, 2), (0, 3), (0, 1, 2), (0, 4)), figures)
    sweep.plot(sweep.read_rows(path), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
