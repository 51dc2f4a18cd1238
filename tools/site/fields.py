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
        if not attr.parent.is_class:
            return
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("option", "field"):
            made = [keyword.value for keyword in value.keywords if keyword.arg == "default_factory"]
            for default in value.args[:1] or made:
                attr.value = griffe.safe_get_expression(called(default), parent=attr.parent)
            if len(value.args) > 1:
                attr.docstring = griffe.Docstring(sentence(joined(value.args[1])), parent=attr)
        elif attr.docstring is None and isinstance(attr.filepath, Path):
            line = agent.code.splitlines()[node.end_lineno - 1]
            if comment := COMMENT.search(line):
                attr.docstring = griffe.Docstring(sentence(comment[1]), parent=attr)

    def on_class(self, *, cls: griffe.Class, loader: Any, **more: Any) -> None:
        """Add the example of a class to its docstring, and leave out what its constructor makes for itself."""
        for name, attr in list(cls.members.items()):
            if not attr.is_attribute or "class-attribute" in attr.labels or attr.docstring is not None:
                continue
            if attr.annotation is None:
                del cls.members[name]
            elif "dataclass" not in cls.labels:
                attr.value = None
        if (code := self.examples.get(cls.path)) and cls.docstring and "```python" not in cls.docstring.value:
            cls.docstring.value += f"\n\n```python\n{code}\n```"


def called(default: ast.expr) -> ast.expr:
    """Return a default, or the call of what makes it: `dict` and a class become `dict()` and `Class()`."""
    is_made = isinstance(default, ast.Name) and (default.id in ("dict", "list") or default.id[:1].isupper())
    is_constant = isinstance(default, ast.Name) and default.id.isupper()
    return ast.Call(default, [], []) if is_made and not is_constant else default


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def joined(node: ast.expr) -> str:
    """Return a text that is written in the code, with its parts that are computed as they are named there."""
    if isinstance(node, ast.JoinedStr):
        return "".join(joined(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return ast.unparse(node.value)
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
