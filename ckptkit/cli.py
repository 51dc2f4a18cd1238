"""The `ckptkit` command; its verbs are in `commands`."""

from collections.abc import Sequence

from ckptkit import commands
from threefold.cli import Parser, run
from threefold.verbs import add_verbs


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog="ckptkit",
        description="Verified, resharding checkpoints on local disks, S3 and any fsspec URL.",
        epilog="S3 settings come from the standard AWS_* variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...). "
        "Exit codes: 0 ok, 1 check failed, 2 usage, 3 I/O, 130 or 143 ended by SIGINT or SIGTERM.",
    )
    return add_verbs(parser, commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    return run(build_parser(), argv)
