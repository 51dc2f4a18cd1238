"""The verbs of a kit, a file each: `KIT/commands/VERB.py` holds the dataclass Options and the function run.

The package lists its verbs in the order of the help, `help` and `completion` come with every kit. What a file's first
line says behind the verb is its summary, the first lines of `run` are the description; `run` returns the exit code, or
None for 0. A file is imported and a verb's arguments are added when its parser is first used, so that no other verb and
no `--help` of all pays for it.
"""

import argparse
import importlib
from functools import partial
from pathlib import Path
from types import ModuleType

from threefold.cli import Parser
from threefold.flags import add_options, foreign_of, read_options
from threefold.packages import needed_for

SHELLS = ("bash", "zsh", "tcsh")


def add_verbs(parser: Parser, commands: ModuleType) -> Parser:
    """Add the verbs of a package of commands to a parser, then `help` and `completion`; return the parser."""
    verbs = parser.add_subparsers(metavar="{" + ",".join((*commands.VERBS, "help", "completion")) + "}")
    for name in commands.VERBS:
        module = name.replace("-", "_")
        verb = verbs.add_parser(name, help=summary(Path(str(commands.__file__)).with_name(f"{module}.py")))
        verb.fill_later(partial(_fill, module=f"{commands.__name__}.{module}"))
    about = verbs.add_parser("help", help="show the help of a verb", description="Show the help of a verb, or of all.")
    about.add_argument("verb", nargs="?", metavar="VERB", help="a verb, such as " + commands.VERBS[0])
    about.set_defaults(handler=lambda arguments: _help(parser, arguments.verb))
    completion = verbs.add_parser(
        "completion",
        help="print what completes this command in a shell",
        description="Print a script that completes verbs, flags, choices and paths in a shell; needs "
        f'threefold[completion]. For bash: eval "$({parser.prog} completion bash)"',
    )
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    completion.set_defaults(handler=lambda arguments: _complete(parser, verbs, arguments.shell))
    return parser


def summary(file: Path) -> str:
    """Return what the first line of a verb's file says of it: its docstring begins with "`KIT VERB`: SUMMARY."."""
    with file.open(encoding="utf-8") as lines:
        return lines.readline().partition("`: ")[2].rstrip('."\n')


def _fill(parser: Parser, module: str) -> None:
    """Import a verb, and add its arguments to its parser."""
    verb = importlib.import_module(module)
    parser.description = verb.run.__doc__
    add_options(parser, verb.Options)
    has_settings, foreign = foreign_of(verb.Options)
    if has_settings:
        parser.reword(foreign)
    parser.set_defaults(handler=lambda arguments: verb.run(read_options(verb.Options, arguments)))


def _help(parser: Parser, verb: str | None) -> int:
    """Print what `--help` prints: of the verb, else of all."""
    if verb is None:
        parser.print_help()
    else:
        parser.parse_args([verb, "--help"])
    return 0


def _complete(parser: Parser, verbs: "argparse._SubParsersAction[Parser]", shell: str) -> int:
    """Print a shell's completion of all verbs; what has no choices is completed as a path."""
    with needed_for("completion"):
        import shtab
    for verb in verbs.choices.values():
        verb.fill()
        for action in verb._actions:
            if action.nargs != 0 and action.choices is None and action.type is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, shell))
    return 0
