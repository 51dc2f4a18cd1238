"""The voice that all three command lines share: `error:` and `hint:` lines, exit codes, JSON to stdout."""

import argparse
import contextlib
import difflib
import io
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from threefold.console import log as log
from threefold.console import report as report
from threefold.errors import EXIT_IO, EXIT_OK, EXIT_USAGE, StorageError, UserError, is_utf8, listed, quoted
from threefold.masking import masked_values, printable
from threefold.options import choice_meant
from threefold.packages import explained
from threefold.rewording import Foreign, Rewording, unknown
from threefold.version import __version__

SAME_WITHIN_S = 0.3
Handler = Callable[[argparse.Namespace], int | None]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage faults speak in our voice; flags are never abbreviated."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]
        self._given: list[str] = []
        self._filler: Callable[[Parser], None] | None = None
        self._foreign: tuple[Foreign | None] | None = None
        self._rest = ""

    def fill_later(self, filler: "Callable[[Parser], None]") -> None:
        """Let a function add the arguments when the parser is first used."""
        self._filler = filler

    def fill(self) -> None:
        """Add the arguments that were put off."""
        filler, self._filler = self._filler, None
        if filler is not None:
            filler(self)

    def reword(self, foreign: Foreign | None) -> None:
        """Let flags do without their value, and, if something knows them, be those of other programs."""
        self._foreign = (foreign,)

    def report_signal(self, number: int) -> None:
        """Report the signal that ended the command."""
        print("terminated" if number == signal.SIGTERM else "interrupted", file=sys.stderr)

    def take_rest(self, name: str) -> None:
        """Let one argument have all words as they are, flags too; but `-h` or `--help` as the first is the verb's."""
        self._rest = name

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown flags here, in the verb's own parser, which knows what may have been meant."""
        self.fill()
        self._given = list(sys.argv[1:] if args is None else args)
        if self._rest and self._given[:1] not in (["-h"], ["--help"]):
            parsed, _ = super().parse_known_args([], namespace)
            setattr(parsed, self._rest, self._given)
            return parsed, []
        words = None
        if self._foreign is not None:
            words = Rewording(self._option_string_actions, *self._foreign)
            words.read(self._given)
            self._refuse(words.faults)
            args = words.arguments
        parsed, left = super().parse_known_args(args, namespace)
        flags = [text.partition("=")[0] for text in left if text.startswith("-")]  # what follows one may be its value
        self._refuse([unknown(flag, self._option_string_actions) for flag in flags or left[:1]])
        if words is not None:
            words.put(parsed)
        return parsed, left

    def has(self, flag: str) -> bool:
        """Return whether a flag was added."""
        return flag in self._option_string_actions

    def _refuse(self, faults: Sequence[str]) -> None:
        """End with all that is not known of a command line, if there is anything."""
        if len(faults) == 1:
            self.error(faults[0])
        if faults:
            self.error(f"{len(faults)} arguments that {self.prog} does not have" + listed(faults, most=len(faults)))

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Refuse a verb or a choice that does not exist, and say which may have been meant."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        close = choice_meant(str(value), choices) or next(iter(difflib.get_close_matches(str(value), choices, 1)), None)
        meant = f"did you mean {close}?" if close else f"choose from {', '.join(choices)}"
        name = "/".join(action.option_strings) or "verb"
        self.error(f"{name}: there is no {value}, {meant}")

    def error(self, message: str) -> "None":  # type: ignore[override]
        if "are required" in message:  # argparse looks for these first, and a misspelt flag is why they are missing
            given, self._given = self._given, []
            flags = (text.partition("=")[0] for text in itertools.takewhile(lambda text: text != "--", given))
            actions = self._option_string_actions
            self._refuse([unknown(flag, actions) for flag in flags if flag.startswith("--") and flag not in actions])
        report(UserError(message, hint=f"{self.prog} --help"))
        raise SystemExit(EXIT_USAGE)


def print_json(value: object, *, masks: bool = True) -> None:
    """Print a value to stdout as one JSON document; passwords of URLs are masked unless it holds texts of documents."""
    print(json.dumps(masked_values(value) if masks else value, indent=2, default=str))


def print_line(text: str) -> None:
    """Print a line of a report to stdout, with escapes for control characters in it and passwords masked."""
    print(printable(text))


def run(parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Parse argv, call the verb's handler (`set_defaults(handler=...)`) and turn its outcome into an exit code."""
    _mend_streams()
    try:
        try:
            return _call(parser, argv)
        finally:
            _flush_stdout()
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_OK
    except StorageError as error:
        report(error)
        return error.exit_code


def _call(parser: Parser, argv: Sequence[str] | None) -> int:
    if not parser.has("--version"):
        parser.add_argument("--version", action="version", version=f"threefold {__version__}", help="print the version")
    arguments = parser.parse_args(argv)
    handler: Handler | None = getattr(arguments, "handler", None)
    if handler is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        with _unwinding_at_signals():
            return handler(arguments) or EXIT_OK
    except UserError as error:
        report(error)
        return error.exit_code
    except ImportError as error:
        if (fault := explained(error)) is None:
            raise
        report(fault)
        return fault.exit_code
    except BrokenPipeError:
        raise
    except (UnicodeEncodeError, TypeError) as error:
        if (unprintable := _unprintable(error, sys.argv[1:] if argv is None else argv)) is None:
            raise
        report(unprintable)
        return EXIT_USAGE
    except OSError as error:
        from threefold.storage.local import system_failure

        report(system_failure(error))
        return EXIT_IO
    except MemoryError as error:
        report(StorageError(f"not enough memory: {error}"))
        return EXIT_IO
    except Stopped as stopped:
        parser.report_signal(stopped.number)
        return 128 + stopped.number
    except KeyboardInterrupt:
        parser.report_signal(signal.SIGINT)
        return 128 + signal.SIGINT


def _unprintable(error: Exception, argv: Sequence[str]) -> UserError | None:
    """Return what to report if a name that is not UTF-8 had to be encoded, None if the error is another one."""
    if "surrogates not allowed" not in str(error):  # both of Python and of orjson, whose error is a TypeError
        return None
    names = [text for text in argv if not is_utf8(text)]
    found = repr(error.object[:200]) if isinstance(error, UnicodeEncodeError) else "a name that was found"
    shown = ", ".join(map(repr, names)) or found
    hint = f"mv {quoted(names[0])} NEW, or choose another name" if names else "find . | grep -avx '.*' names such files"
    return UserError(f"{shown} is not UTF-8, and cannot be stored or sent", hint=hint)


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end: what is under way is unwound and cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _unwinding_at_signals() -> Iterator[None]:
    """Let a SIGINT or SIGTERM unwind the block as `Stopped`, and a second one end the process at once.

    What comes within SAME_WITHIN_S is the same request: `timeout` and launchers signal a process and its group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: FrameType | None) -> None:
        for name in usual:
            signal.signal(name, signal.SIG_IGN)
        time.sleep(SAME_WITHIN_S)
        for name in usual:
            signal.signal(name, signal.SIG_DFL)
        raise Stopped(number)

    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    usual = {name: handler for name, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for name in usual:
        signal.signal(name, unwind)
    try:
        yield
    finally:
        for name, handler in usual.items():
            signal.signal(name, handler)


def _mend_streams() -> None:
    """Have somewhere to print to where the caller closed a stream, whose number a file of data would get otherwise."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # until the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that the encoding has no letters for


def _flush_stdout() -> None:
    """Meet here, and not when Python ends, what becomes of what was printed."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        raise StorageError(f"cannot write to standard output: {error.strerror}") from error


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
