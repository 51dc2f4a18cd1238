"""Hints that tests meet, taken as the next command: none may lead into another error of usage.

Whatever a command line of the kits reports in a test is noted with its arguments and current folder. When the test is
over, and its patches are undone, the hint's command is run. `--flag value` is put into the arguments that failed.
"""

import importlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import threefold.cli
from threefold.errors import UserError

PROGRAMS = ("datakit", "ckptkit", "trainer")
SHELL = ("ls", "head", "cat", "sed", "wc", "df", "mkdir", "iconv", "python")
ENDS = re.compile(
    r"; |, of |, or |, if |, and |, to | to | in place of | if | names | reads | shows | writes | adds |  +# | \("
)
ROOT, WRITES = str(Path(__file__).parents[2]), {"--plot", "--output", "--save", "--report"}
IN_PLACE_OF = re.compile(r" in place of (--[a-z-]+)")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.")


@dataclass(frozen=True)
class Met:
    """A hint that a command line printed."""

    program: str
    arguments: tuple[str, ...]
    folder: str
    message: str
    hint: str

    def is_of(self, program: str, verb: str) -> bool:
        """Whether the hint's command is of a program and verb."""
        return (self.command or [])[:2] == [program, verb]

    @property
    def text(self) -> str:
        """The part of the hint that may be a command."""
        text = self.hint.partition(": ")[2] if re.match(r"[a-z][a-z ]*: \w+ ", self.hint) else self.hint
        return ENDS.split(text)[0]

    @property
    def command(self) -> list[str] | None:
        """The next command as its words; None if the hint is words for a person."""
        try:
            words = shlex.split(self.text)
        except ValueError:
            return None
        if not words or PLACEHOLDER.search(self.text) or "://" in self.text:
            return None
        if words[0] in SHELL or (words[0] in PROGRAMS and len(words) > 1):
            return words
        if words[0].startswith("--") and not any("://" in word for word in self.arguments):
            replaced = IN_PLACE_OF.findall(self.hint)
            return [self.program, *with_flags(self.arguments, words, replaced)]
        return None


def with_flags(arguments: Sequence[str], words: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """Arguments with flags in place of those of the same names, and of replaced ones."""
    flags, kept_words, skips = (
        {*(word.partition("=")[0] for word in words if word.startswith("--")), *replaced},
        [],
        False,
    )
    for argument in arguments:
        if skips and not argument.startswith("--"):
            skips = False
            continue
        skips = argument in flags
        if not skips and argument.partition("=")[0] not in flags:
            kept_words.append(argument)
    return [*kept_words, *words]


class Recorder:
    """The hints that command lines printed since it was emptied; those of child processes are not among them."""

    def __init__(self) -> None:
        self.met: list[Met] = []
        self.served: list[tuple[int, str, str]] = []  # how many hints were met before, program and verb
        self._running: list[tuple[str, tuple[str, ...]]] = []

    def clear(self) -> None:
        """Forget what was noted."""
        self.met.clear()
        self.served.clear()

    def faults(self) -> list[str]:
        """What is wrong with each hint's command; nothing is if the same verb served the test since."""
        met, served = list(self.met), list(self.served)
        left = {
            hint: None
            for number, hint in enumerate(met)
            if not any(before > number and hint.is_of(*verb) for before, *verb in served)
        }
        return [fault for hint in left if (fault := fault_of(hint))]

    def install(self) -> None:
        """Note what command lines of this process report from now on."""
        call, report = threefold.cli._call, threefold.cli.report

        def noting_call(parser: Any, argv: Sequence[str] | None = None) -> int:
            arguments = tuple(map(str, argv or ()))
            self._running.append((parser.prog, arguments))
            try:
                code = call(parser, argv)
            finally:
                self._running.pop()
            if code == 0 and arguments:
                self.served.append((len(self.met), parser.prog, arguments[0]))
            return code

        def noting_report(error: UserError) -> None:
            if getattr(error, "hint", None) and self._running:
                self.met.append(Met(*self._running[-1], os.getcwd(), error.message, error.hint))
            report(error)

        threefold.cli._call, threefold.cli.report = noting_call, noting_report


def fault_of(met: Met) -> str:
    """What is wrong with the next command; nothing if it runs, or is not one to run."""
    command = met.command
    if command is None or not os.path.isdir(met.folder) or (met.folder == ROOT and WRITES & set(command)):
        return ""
    program, *arguments = command
    with chdir(met.folder):
        if program in SHELL:
            done = subprocess.run(["bash", "-c", met.text], capture_output=True, text=True, timeout=20)
            code, said = done.returncode, done.stderr
        else:
            code, said = outcome(program, arguments)
    return "" if code in (0, 1) else f"{met.message}\nhint: {met.hint}\n{shlex.join(command)} ends with {code}: {said}"


def outcome(program: str, arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command of a kit, run in this process, and what it printed of its faults."""
    if program == "trainer":
        if arguments[0] not in ("train", "plan", "schedule"):
            return 0, ""  # they would train and generate
        arguments = [*arguments, *(["--dry-run"] if arguments[0] == "train" else [])]
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        try:
            return importlib.import_module(f"{program}.cli").main(arguments), said.getvalue()
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
