"""The voice that all three command lines share: `error:` and `hint:` lines, exit codes, JSON to stdout."""

import argparse
import difflib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence

from threefold.errors import EXIT_IO, EXIT_OK, EXIT_USAGE, StorageError, UserError

Handler = Callable[[argparse.Namespace], int | None]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage faults speak in our voice; flags are never abbreviated."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown flags here, in the verb's own parser, which knows what may have been meant."""
        self._given = list(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed, unknown

    def _refuse(self, argument: str) -> None:
        flag = argument.partition("=")[0]
        close = difflib.get_close_matches(flag, self._option_string_actions, 1)
        self.error(f"unknown argument {flag}" + (f", did you mean {close[0]}?" if close else ""))

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Refuse a verb or a choice that does not exist, and say which may have been meant."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        close = difflib.get_close_matches(str(value), choices, 1)
        meant = f"did you mean {close[0]}?" if close else f"choose from {', '.join(choices)}"
        name = "/".join(action.option_strings) or "verb"
        self.error(f"{name}: there is no {value}, {meant}")

    def error(self, message: str) -> "None":  # type: ignore[override]
        if "are required" in message:  # argparse looks for these first, and a misspelt flag is why they are missing
            given, self._given = self._given, []
            for argument in itertools.takewhile(lambda text: text != "--", given):
                if argument.startswith("--") and argument.partition("=")[0] not in self._option_string_actions:
                    self._refuse(argument)
        report(UserError(message, hint=f"{self.prog} --help"))
        raise SystemExit(EXIT_USAGE)


def report(error: Exception) -> None:
    """Print an error to stderr as `error: ...` and, where there is one, `hint: ...`."""
    message = error.message if isinstance(error, UserError) else str(error) or type(error).__name__
    print(f"error: {message}", file=sys.stderr)
    if isinstance(error, UserError) and error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def print_json(value: object) -> None:
    """Print a value to stdout as one JSON document."""
    print(json.dumps(value, indent=2, default=str))


def log(text: str) -> None:
    """Print a line of progress, or any other that is no data, to stderr."""
    print(text, file=sys.stderr, flush=True)


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
    arguments = parser.parse_args(argv)
    handler: Handler | None = getattr(arguments, "handler", None)
    if handler is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        return handler(arguments) or EXIT_OK
    except UserError as error:
        report(error)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        report(error)
        return EXIT_IO
    except MemoryError as error:
        report(StorageError(f"not enough memory: {error}"))
        return EXIT_IO
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


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
