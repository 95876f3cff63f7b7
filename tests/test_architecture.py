"""docs/architecture.md says which way imports go, and they do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """All modules of both packages by name."""
    found = {}
    for package in ("jaxspec", "pallas_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules among `known` that a file imports, inside functions and for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: a relative import")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("jaxspec", "pallas_kernels")}


def rows() -> list[list[str]]:
    """The rooms of the documented table, from the top."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("| rooms | what they hold |", 1)[1].split("\n\n", 1)[0]
    return [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in table.splitlines() if "`" in line]


def room_of(module: str, rooms: list[str]) -> str:
    """The documented room with the longest name that the module belongs to."""
    fitting = [room for room in rooms if module == room or (room != "jaxspec" and module.startswith(f"{room}."))]
    assert fitting, f"{module} belongs to no room of docs/architecture.md"
    return max(fitting, key=len)


KNOWN = modules()
GRAPH = {name: imports(path, KNOWN) - {name} for name, path in KNOWN.items()}


def test_imports_go_downwards():
    table = rows()
    rank = {room: i for i, line in enumerate(table) for room in line}
    assert len(rank) > 25 and len(rank) == sum(map(len, table))
    upwards = []
    for name, wanted in GRAPH.items():
        here = room_of(name, list(rank))
        for other in sorted(wanted):
            there = room_of(other, list(rank))
            if rank[here] > rank[there]:
                upwards.append(f"{name} ({here}) imports {other} ({there})")
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other():
    settled: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a circle: " + " → ".join((*path[path.index(name) :], name))
        if name not in settled:
            for other in GRAPH[name]:
                visit(other, (*path, name))
            settled.add(name)

    for name in GRAPH:
        visit(name, ())


def test_every_room_exists():
    for line in rows():
        for room in line:
            assert room in KNOWN, f"docs/architecture.md names {room}, which does not exist"


def test_a_forbidden_import_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from jaxspec.loading import load\n    import jaxspec.config\n    return load\n")
    assert imports(file, KNOWN) == {"jaxspec.loading", "jaxspec.config"}


CHOICES = re.compile(r"\b(available|serves|capability)\(|\b(mosaic|triton|cudnn)\b")
"""What says which kernel runs: that is for `pallas_kernels` alone to decide."""


def choices(path: Path) -> set[str]:
    """Such calls, and names of back ends among the strings that are not prose, of a file."""
    tree = ast.parse(path.read_text())
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    prose |= {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {name for name in [ast.unparse(node.func).split(".")[-1]] if CHOICES.fullmatch(f"{name}(")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose and len(node.value) < 20:
            found |= {node.value} if CHOICES.search(node.value.lower()) else set()
    return found


def test_only_pallas_kernels_chooses_a_kernel():
    """Beside it only the user's option for prefill names a library; and nothing reaches behind an operation's interface."""
    named = {name: choices(path) for name, path in KNOWN.items() if name.split(".")[0] == "jaxspec"}
    assert {name: found for name, found in named.items() if found} == {"jaxspec.engine.sizes": {"cudnn"}}
    interfaces = {"pallas_kernels", "pallas_kernels.device", "pallas_kernels.attention.rows"}
    for name, wanted in GRAPH.items():
        if name.split(".")[0] == "jaxspec":
            behind = {other for other in wanted if other.startswith("pallas_kernels") and not other.endswith(".api")}
            assert behind <= interfaces, f"{name} imports {behind - interfaces}"


def test_a_choice_of_a_kernel_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        '"""On triton."""\nif kernels.available() and device.capability() and serves(x):\n    run(x, backend="triton")\n'
    )
    assert choices(file) == {"available", "capability", "serves", "triton"}
