"""The writer process imports nothing of the trainer's side of a save, and no torch, not even inside a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def imported(node: ast.AST) -> Iterator[str]:
    """Modules, and names that may be modules, imported anywhere in a tree, but for type checkers alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_the_writer_imports_neither_the_trainers_side_nor_torch() -> None:
    importers, pending = dict[str, str](), [("ckptkit.writer.__main__", "")]
    while pending:
        module, importer = pending.pop()
        if module in importers:
            continue
        importers[module] = importer
        if path := file_of(module):
            pending += [(name, module) for name in imported(ast.parse(path.read_text()))]
    assert "ckptkit.handoff.protocol" in importers
    unwanted = ("torch", "ckptkit.saving", "ckptkit.tiers", "ckptkit.io.torch_tensors")
    assert [f"{importers[name]} imports {name}" for name in importers if name.startswith(unwanted)] == []
