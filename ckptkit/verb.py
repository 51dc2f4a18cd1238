"""What the verbs of the `ckptkit` command have in common."""

import argparse
from collections.abc import Callable

from threefold.cli import Handler, Parser

Verbs = argparse._SubParsersAction  # what add_subparsers gives


def add_verb(verbs: "Verbs[Parser]", name: str, handler: Handler, *, summary: str, description: str) -> Parser:
    """The parser of one verb, with --json; the summary stands in the list of verbs, the description in its own help."""
    verb = verbs.add_parser(name, help=summary, description=description)
    verb.add_argument("--json", action="store_true", help="print one JSON document")
    verb.set_defaults(handler=handler)
    return verb


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, at least this one."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return parse
