"""The GPU suite: `python -m pytest tests/gpu -q`, or with `-n 8` where pytest-xdist is installed. Skipped without a GPU."""

import os
import pathlib

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers may share the card
if pathlib.Path("/dev/nvidiactl").exists():
    # Kernels are tested as users compile them; the rest of the suite turns LLVM's optimiser off. The float32 references
    # need not be fast, and must not vary as autotuned products do.
    flags = os.environ.get("XLA_FLAGS", "").replace("--xla_backend_optimization_level=0", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """Marks this folder's tests; without a GPU they are skipped."""
    has_gpu = jax.default_backend() == "gpu"
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
