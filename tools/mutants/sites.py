"""Mutants: small changes of a program's arithmetic, comparisons, indices, slices and groups, drawn from a seed."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*"}
COMPARISONS = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
GROUPS = {"tp": "dp", "cp": "dp", "dp": "tp", "pp": "dp", "inner": "outer", "outer": "inner", "size": "index"}
LEFT_OUT = (ast.Assert, ast.Raise, ast.JoinedStr)  # whose parts change no number


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one expression of a file."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    source: str  # of the whole file, changed

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def all_mutants(root: Path, places: Sequence[str]) -> list[Mutant]:
    """Return all mutants of the files in some places."""
    paths = [root / place for place in places]
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
    return [mutant for file in files for mutant in mutants_of(file.read_text(), str(file.relative_to(root)))]


def drawn(mutants: Sequence[Mutant], lines: set[tuple[str, int]], seed: str, known: set[str]) -> Mutant:
    """Return a mutant of a line among some that is not known yet; which one follows from the seed."""
    return Random(seed).choice([each for each in mutants if (each.path, each.line) in lines and str(each) not in known])


def mutants_of(source: str, path: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, in the order of their places."""
    text = Text(source)
    for node in _expressions(ast.parse(source)):
        for kind, after in _changes(node, text.of):
            yield Mutant(path, node.lineno, kind, text.of(node), after, text.replaced(node, after))


class Text:
    """A source whose expressions are found by lines and columns, which count bytes."""

    def __init__(self, source: str) -> None:
        self._source, self._starts = source.encode(), [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _ends(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None, "of a source that was parsed"
        assert node.end_col_offset is not None, "of a source that was parsed"
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        start, stop = self._ends(node)
        return self._source[start:stop].decode()

    def replaced(self, node: ast.expr, after: str) -> str:
        """Return the source with another text for an expression."""
        start, stop = self._ends(node)
        return (self._source[:start] + after.encode() + self._source[stop:]).decode()


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that are computed with: no annotation, no type, nothing of an assertion or a text."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, LEFT_OUT):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _expressions(child)


def _changes(node: ast.expr, text: Callable[[ast.expr], str]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each change of an expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield "arithmetic", f"(({text(node.left)}) {ARITHMETIC[type(node.op)]} ({text(node.right)}))"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", f"(({text(node.left)}) {COMPARISONS[type(node.ops[0])]} ({text(node.comparators[0])}))"
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not text(node.value)[:1].isupper():
        index, value = node.slice, text(node.value)
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            yield "index", f"{value}[{index.value + 1}]"
        elif isinstance(index, ast.Slice) and index.step is None:
            lower, upper = (text(part) if part is not None else "" for part in (index.lower, index.upper))
            if lower:
                yield "slice", f"{value}[({lower}) + 1:{upper}]"
            if upper:
                yield "slice", f"{value}[{lower}:({upper}) - 1]"
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in GROUPS:
        yield "group", f"{text(node.value)}.{GROUPS[node.attr]}"


def _is_text(node: ast.BinOp) -> bool:
    sides = node.left, node.right
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
