"""The `trainer` command; its verbs are in `commands`."""

from collections.abc import Sequence

from threefold.cli import Parser, run
from threefold.verbs import add_verbs
from trainer import commands
from trainer.job.environment import prepare_torch
from trainer.job.failure import JobParser, is_launched, leave


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = JobParser(prog="trainer", description="A compact tensor x pipeline x data parallel GPT trainer.")
    return add_verbs(parser, commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    prepare_torch()
    try:
        code = run(build_parser(), argv)
    except SystemExit as ended:  # what ranks agreed on, or a usage fault
        if not (isinstance(ended.code, int) and is_launched()):
            raise
        code = ended.code
    if code and is_launched():
        leave(code)
    return code
