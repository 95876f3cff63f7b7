"""The GPU suite: `python -m pytest tests/gpu -q`, or with `-n 8` where pytest-xdist is installed. Skipped without a GPU."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers may share the card

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """Without a GPU every test of this folder is skipped."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "tests/gpu" in str(item.path).replace(os.sep, "/"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
