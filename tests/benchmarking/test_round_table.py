"""The table of rounds beside SGLang's, the README that holds it, and what every file of results must say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import round_table

from jaxspec.benchmarking import records
from jaxspec.benchmarking.records import read_rows, write_rows
from jaxspec.config import ConfigError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_readme_shows_the_measured_rounds():
    table = round_table.markdown(read_rows(RESULTS / "h200_round.json"))
    assert f"{round_table.BEGIN}\n{table}\n{round_table.END}" in (ROOT / "README.md").read_text()


def test_sglang_s_best_run_counts(tmp_path):
    def run(cells, env=None, profile=None, **kwargs):
        made = [{"batch": batch, "prompt": 512, "ms_per_cycle": times} for batch, times in cells.items()]
        return {"engine_kwargs": kwargs, "env": env or {}, "cells": [*made, {"ttft_prompt": 512}], "gpu_profile": profile}

    tree = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    runs = [
        run({1: [5.0, 4.0, 9.0], 8: [6.0]}),
        run({1: [4.5, 4.5]}, profile={"1": {"gpu_busy_ms": 4.25}}),
        run({1: [8.0]}, speculative_algorithm="EAGLE3", **tree),
        run({1: [1.0]}, {"SGLANG_SIMULATE_ACC_LEN": "3"}, speculative_algorithm="EAGLE3", **tree),
        run({1: [7.0]}, {"SGLANG_SIMULATE_ACC_LEN": "3"}, speculative_algorithm="NGRAM", speculative_num_draft_tokens=16),
        run({1: [6.5]}, speculative_algorithm="DFLASH"),
    ]
    (tmp_path / "peer.json").write_text(json.dumps({"runs": runs}))
    assert round_table.peer_rounds(tmp_path / "peer.json") == {
        ("plain", 1): (4.5, 4.25),
        ("plain", 8): (6.0, None),
        ("eagle3 5/4/8", 1): (8.0, None),
        ("ngram 16", 1): (7.0, None),
        ("dflash 16", 1): (6.5, None),
    }


def test_the_table_is_written_between_the_marks(tmp_path, capsys):
    readme, table = tmp_path / "README.md", tmp_path / "rounds.json"
    readme.write_text(f"before\n{round_table.BEGIN}\nold\n{round_table.END}\nafter\n")
    row = {"name": "eagle3 3/1/4", "batch": 8, "context": 512, "ms": 3.11, "floor_ms": 1.5551}
    write_rows(table, [row, {**row, "name": "no row of the suite"}])
    assert round_table.main([str(table), "--readme", str(readme)]) == 0 and not capsys.readouterr().out
    before, begin, _, _, line, end, after = readme.read_text().splitlines()
    assert (before, begin, end, after) == ("before", round_table.BEGIN, round_table.END, "after")
    assert line == "| eagle3 3/1/4 | 8 | 512 | 3.11 ms | 1.56 ms (50%) | 6.22 (6.01) | 2.00 |"
    readme.write_text("nothing")
    with pytest.raises(ConfigError, match="rounds"):
        round_table.main([str(table), "--readme", str(readme)])
    assert readme.read_text() == "nothing"
    with pytest.raises(ConfigError, match=r"absent\.json holds no rows"):
        round_table.main([str(tmp_path / "absent.json")])


@pytest.mark.parametrize("path", [*sorted(RESULTS.glob("*.json")), round_table.PEER], ids=lambda path: path.stem)
def test_files_of_results_say_what_measured_them(path):
    said = json.loads(path.read_text())
    missing = [name for name in records.PROVENANCE if not said.get(name)]
    assert not missing or (path == round_table.PEER and missing == ["commit"])
    assert said["versions"].keys() & {"jax", "sglang"} and said["command"].startswith("python ")


def test_rows_are_written_with_what_measured_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "jaxspec" / "bench.py"), "round", "--json", str(tmp_path / "x.json"), "a b"])
    write_rows(tmp_path / "x.json", [{"ms": 1.0}], target="tiny")
    said = json.loads((tmp_path / "x.json").read_text())
    assert said["command"] == "python -m jaxspec.bench round --json x.json 'a b'" and said["target"] == "tiny"
    assert set(records.PROVENANCE) < set(said) and read_rows(tmp_path / "x.json") == [{"ms": 1.0}]
    for text in ("[1]", "{}", '{"rows": [1]}', "no JSON"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json is not a file of results with rows"):
            read_rows(tmp_path / "bad.json")
    assert read_rows(tmp_path / "absent.json") == []
