"""Shared by all tests: jaxspec's core signatures check shapes and types while tests run."""

from jaxtyping import install_import_hook

CHECKED = ("jaxspec.sampling", "jaxspec.verify", "jaxspec.tree")

install_import_hook(CHECKED, "beartype.beartype")
