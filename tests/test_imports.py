"""The import direction is the architecture: threefold <- {datakit, ckptkit} <- trainer, torch only where named."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "threefold": set(),
    "datakit": {"threefold"},
    "ckptkit": {"threefold"},
    "trainer": {"threefold", "datakit", "ckptkit"},
}
KITS = set(ALLOWED)
# the only files outside trainer that may name torch, and only inside functions
TORCH_FILES = {"ckptkit/torch_tensors.py"}


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("kit", sorted(ALLOWED))
def test_a_kit_imports_only_what_stands_below_it(kit: str) -> None:
    assert sources(kit)
    for path in sources(kit):
        tops = {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
        assert tops & KITS - {kit} <= ALLOWED[kit], f"{path.relative_to(ROOT)} imports {sorted(tops & KITS)}"
        if kit != "trainer" and "torch" in tops:
            assert str(path.relative_to(ROOT)) in TORCH_FILES, f"{path.relative_to(ROOT)} imports torch"


@pytest.mark.parametrize("folder", ["tools", "benchmarks", "examples"])
def test_programs_use_public_names_only(folder: str) -> None:
    for path in sources(folder):
        for name in imported_names(ast.parse(path.read_text())):
            parts = name.split(".")
            private = parts[0] in KITS and any(part.startswith("_") for part in parts)
            assert not private, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("kit", sorted(KITS - {"threefold"}))
def test_every_public_name_is_there(kit: str) -> None:
    package = import_module(kit)
    for name in package.__all__:
        assert getattr(package, name).__module__.startswith(f"{kit}.")
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = package.nothing_of_this_name
