"""An extension of griffe, which reads the code for the reference: what fields say of themselves, and examples.

A field of a dataclass that is an `option` has its default and its help; any other may have a comment behind it. The
example of a public class comes at the end of its docstring.
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe

from tools.site.reference import DOORS, NAMED, examples, public_names

COMMENT = re.compile(r"(?<=  )# (?!type:|noqa|fmt:)(.+)$")


class Fields(griffe.Extension):
    """Fills in defaults and docstrings of fields, and the examples of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = {
            f"{module}.{name}": code
            for door in (*DOORS, *NAMED)
            for name, module in public_names(door).items()
            for code in [examples(door).get(name)]
            if code
        }

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **more: Any) -> None:
        """Take default and help out of an option, or the comment behind a field."""
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "option" and attr.parent.is_class:
            default, text = value.args[:2]
            attr.value = griffe.safe_get_expression(default, parent=attr.parent)
            attr.docstring = griffe.Docstring(joined(text), parent=attr)
        elif attr.docstring is None and attr.parent.is_class and isinstance(attr.filepath, Path):
            line = agent.code.splitlines()[node.end_lineno - 1]
            if comment := COMMENT.search(line):
                attr.docstring = griffe.Docstring(comment[1][:1].upper() + comment[1][1:] + ".", parent=attr)

    def on_class(self, *, cls: griffe.Class, loader: Any, **more: Any) -> None:
        """Add the example of a class to its docstring."""
        if (code := self.examples.get(cls.path)) and cls.docstring and "```python" not in cls.docstring.value:
            cls.docstring.value += f"\n\n```python\n{code}\n```"


def joined(node: ast.expr) -> str:
    """Return a text that is written in the code, with its parts that are computed as they are named there."""
    if isinstance(node, ast.JoinedStr):
        return "".join(joined(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return ast.unparse(node.value)
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
