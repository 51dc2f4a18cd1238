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
from typing import Any

import threefold.cli
from threefold.errors import UserError

PROGRAMS = ("datakit", "ckptkit", "trainer")
SHELL = ("ls", "head", "cat", "sed", "wc", "df", "mkdir", "iconv", "python")
ENDS = re.compile(r"; |, of |, or |, if |, and |, to | if | names | reads | shows | writes | adds |  +# | \(")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.")


@dataclass(frozen=True)
class Met:
    """A hint that a command line printed."""

    program: str
    arguments: tuple[str, ...]
    folder: str
    message: str
    hint: str

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
            return [self.program, *with_flags(self.arguments, words)]
        return None


def with_flags(arguments: Sequence[str], words: Sequence[str]) -> list[str]:
    """Arguments in which flags have other values."""
    flag, kept, skips = words[0].partition("=")[0], [], False
    for argument in arguments:
        if skips and not argument.startswith("--"):
            skips = False
            continue
        skips = argument == flag
        if not skips and not argument.startswith(f"{flag}="):
            kept.append(argument)
    return [*kept, *words]


class Recorder:
    """The hints that command lines printed since it was emptied; those of child processes are not among them."""

    def __init__(self) -> None:
        self.met: list[Met] = []
        self.called: list[list[str]] = []
        self._running: list[tuple[str, tuple[str, ...]]] = []

    def clear(self) -> None:
        """Forget what was noted."""
        self.met.clear()
        self.called.clear()

    def faults(self) -> list[str]:
        """What is wrong with each hint's command, except those that were called since."""
        met, called = list(dict.fromkeys(self.met)), list(self.called)
        left = [hint for hint in met if not any(set(hint.command or ["?"]) <= set(call) for call in called)]
        return [fault for hint in left if (fault := fault_of(hint))]

    def install(self) -> None:
        """Note what command lines of this process report from now on."""
        call, report = threefold.cli._call, threefold.cli.report

        def noting_call(parser: Any, argv: Sequence[str] | None = None) -> int:
            self._running.append((parser.prog, tuple(map(str, argv or ()))))
            self.called.append([parser.prog, *map(str, argv or ())])
            try:
                return call(parser, argv)
            finally:
                self._running.pop()

        def noting_report(error: UserError) -> None:
            if error.hint and self._running:
                self.met.append(Met(*self._running[-1], os.getcwd(), error.message, error.hint))
            report(error)

        threefold.cli._call, threefold.cli.report = noting_call, noting_report


def fault_of(met: Met) -> str:
    """What is wrong with the next command; nothing if it runs, or is not one to run."""
    command = met.command
    if command is None or not os.path.isdir(met.folder):
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
