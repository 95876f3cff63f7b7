"""The table of rounds beside SGLang's, and the README that holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.benchmarking import peers
from jaxspec.config import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_measured_rounds():
    rows = json.loads((ROOT / "benchmarks/results/h200_round.json").read_text())
    assert peers.markdown(rows) in (ROOT / "README.md").read_text()


def test_the_table_is_written_between_the_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{peers.BEGIN}\nold\n{peers.END}\nafter\n")
    row = {"name": "eagle3 3/1/4", "batch": 8, "context": 512, "ms": 3.11, "floor_ms": 1.5551}
    peers.write_readme(readme, [row, {**row, "name": "no row of the suite"}])
    before, begin, _, _, line, end, after = readme.read_text().splitlines()
    assert (before, begin, end, after) == ("before", peers.BEGIN, peers.END, "after")
    assert line == "| eagle3 3/1/4 | 8 | 512 | 3.11 ms | 1.56 ms (50%) | 6.22 (6.01) | 2.00 |"


def test_a_readme_without_marks_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    with pytest.raises(ConfigError, match="rounds"):
        peers.write_readme(readme, [])
    assert readme.read_text() == "nothing"
