"""Pieces of Markdown that pages made of the code consist of."""

import re
from collections.abc import Sequence


def plain(text: str) -> str:
    """Return a text as it is read, without a meaning in Markdown; what is between backticks stays code."""
    parts = re.split(r"(`[^`\n]+`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_{}\[\]<>#|])", r"\\\1", part) for part in parts)


def code(text: str) -> str:
    """Return a text as code, also in the cell of a table."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def block(name: str, text: str) -> str:
    """Return Markdown in a block that the style sheet knows by a name."""
    return f'<div class="{name}" markdown>\n\n{text}\n</div>\n'
