"""The `datakit` command: text to token stores, and what is in them; its verbs are in `commands`."""

from collections.abc import Sequence

from datakit import commands
from threefold.cli import Parser, run
from threefold.verbs import add_verbs


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    return add_verbs(Parser(prog="datakit", description="Text corpus to token store."), commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    return run(build_parser(), argv)
