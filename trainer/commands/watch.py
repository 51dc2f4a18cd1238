"""`trainer watch`: see a run while it trains."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threefold.cli import print_line
from threefold.errors import EXIT_OK, UserError
from threefold.masking import masked
from threefold.options import argument, option

if TYPE_CHECKING:
    from trainer.observe.watch.tail import Tail
    from trainer.observe.watch.view import View


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer watch`."""

    run: str = argument("RUN", "its metrics file, or a run URL whose newest step names that")
    interval: float = option(2.0, "seconds between two looks", minimum=0.1, metavar="S")
    json: bool = option(False, "print what is known now as one JSON document, and end")


def run(options: Options) -> int:
    """Watch a run by its metrics file, which may be behind a URL, until the run ends: on a terminal a view that is
    drawn again, elsewhere a line for each look that finds a step, and for each event."""
    from trainer.observe.watch.tail import Tail
    from trainer.observe.watch.view import View

    tail, view = Tail(metrics_of(options.run)), View()
    if options.json:
        view.take(tail.read())
        print(view.to_json())
    elif sys.stdout.isatty():
        watch_on_screen(tail, view, options.interval)
    else:
        watch_as_lines(tail, view, options.interval)
    return EXIT_OK


def metrics_of(place: str) -> str:
    """Return the metrics file of a place: itself, or what the newest step of a run there names."""
    from ckptkit import Run
    from threefold.errors import CheckFailed

    if place.endswith((".jsonl", ".json")):
        return place
    run = Run(place)
    try:
        step = run.newest()
        config = run.root(step).metadata.get("config") if step is not None else None
    except CheckFailed:
        config = None
    if step is None:
        return place  # a file of any other name
    log = config.get("log") if isinstance(config, dict) else None
    metrics = log.get("metrics") if isinstance(log, dict) else None
    if not metrics:
        hint = "trainer watch FILE, where the run was started with --metrics FILE"
        raise UserError(f"step {step} of {masked(place)} names no metrics file", hint=hint)
    return str(metrics)


def watch_on_screen(tail: "Tail", view: "View", interval_s: float) -> None:
    """Draw the view until the run ends."""
    from trainer.observe.watch.screen import Silence, screen

    silence = Silence()
    with screen(view, tail.place) as draw:
        while True:
            if lines := tail.read():
                silence.heard()
                view.take(lines)
            draw(silence.seconds)
            if view.is_over:
                return
            time.sleep(interval_s)


def watch_as_lines(tail: "Tail", view: "View", interval_s: float) -> None:
    """Print the newest step of each look, and the events since the one before, until the run ends."""
    from trainer.observe.watch.view import line_text

    while True:
        lines = tail.read()
        view.take(lines)
        newest = max((number for number, line in enumerate(lines) if "event" not in line), default=-1)
        for number, line in enumerate(lines):
            if number == newest or "event" in line:
                print_line(line_text(line))
        sys.stdout.flush()
        if view.is_over:
            return
        time.sleep(interval_s)
