"""What a command shows beside its data: facts, tables and progress; by rich on a terminal, as plain lines elsewhere.

rich is imported only for a terminal, so neither --help nor a pipe pays for it. It keeps to NO_COLOR and TERM.
"""

import os
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from threefold.debug import is_debugging
from threefold.errors import UserError
from threefold.masking import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

WIDTH = 100  # columns of what is read in a log


def log(text: str) -> None:
    """Print a line of progress, or any other that is not data, to stderr, safe for a terminal and without passwords."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def report(error: Exception) -> None:
    """Print an error to stderr as `error: ...` and, if it has one, `hint: ...`; first its traceback when debugging."""
    if is_debugging() and (error.__traceback__ or error.__cause__):
        import traceback

        log("".join(traceback.format_exception(error)).rstrip())
    message = error.message if isinstance(error, UserError) else str(error) or type(error).__name__
    log(f"error: {message}")
    if isinstance(error, UserError) and error.hint:
        log(f"hint: {error.hint}")


def fitting(parts: Iterable[str], separator: str = "  ") -> str:
    """Join parts, the most important ones first, up to the last that ends within WIDTH."""
    line = ""
    for part in parts:
        longer = line + separator + part if line else part
        if line and len(longer) > WIDTH:
            break
        line = longer
    return line


def has_colours(file: TextIO) -> bool:
    """Return whether colours are welcome: on a terminal, unless NO_COLOR is set."""
    return file.isatty() and not os.environ.get("NO_COLOR")


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print a name and a text each to stderr, texts wrapped to WIDTH; a long word, as a URL, stays whole."""
    facts = [(name, printable(text)) for name, text in facts]
    margin = max(len(name) for name, _ in facts) + 2
    if sys.stderr.isatty():
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, text in facts:
            grid.add_row(Text(name, "bold"), Text(text, overflow="fold"))
        console = _console(sys.stderr)
        console.print(grid, width=min(console.width, WIDTH))
        return
    for name, text in facts:
        lines = textwrap.wrap(text, WIDTH - margin, break_long_words=False, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}", *(" " * margin + line for line in lines[1:]), sep="\n", file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()) -> None:
    """Print a table to stdout, its columns as wide as their widest cell; those in `left` are aligned there."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in columns:
            table.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        _console(sys.stdout).print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


class Live:
    """Lines on stderr of a verb that takes long, and how far it is: a bar below them, or further lines."""

    def __init__(self, bar: "Progress | None", lines_every_s: float) -> None:
        self._bar, self._lines_every_s = bar, lines_every_s
        self._task: TaskID | None = None
        self._said_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is None:
            log(text)
        else:
            self._bar.console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)

    def show(self, text: str, share: float) -> None:
        """Show how far the verb is: a text, and which share of all is done."""
        if self._bar is not None:
            text = printable(text)
            if self._task is None:
                self._task = self._bar.add_task(text, total=1.0)
            self._bar.update(self._task, completed=share, description=text)
        elif time.monotonic() - self._said_s >= self._lines_every_s:
            self.say(f"{share:6.1%}  {text}")
            self._said_s = time.monotonic()


@contextmanager
def live(*, lines_every_s: float = 0.0) -> Iterator[Live]:
    """Show progress inside a `with`; without a terminal, a line at most every so many seconds."""
    if not sys.stderr.isatty():
        yield Live(None, lines_every_s)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns: list[Any] = [
        BarColumn(20),
        TextColumn("{task.percentage:>5.1f}%"),
        TextColumn("{task.description}", markup=False),
    ]
    with Progress(*columns, console=_console(sys.stderr), refresh_per_second=4, redirect_stdout=False) as bar:
        yield Live(bar, lines_every_s)


def _console(file: TextIO) -> "Console":
    from rich.console import Console

    return Console(file=file)
