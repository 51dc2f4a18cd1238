"""The process of one sink: `python -P -m trainer.observe.sinks NAME PAGE`, which reads lines of JSON from stdin.

The first line is how it is opened. It ends with its stdin, as the trainer does; where the sink hangs, a thread ends the
process some time after the trainer. Signals that end a job are left to the trainer.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from trainer.observe.sinks.page import Page
from trainer.observe.sinks.sink import Opening, Sink

READ_BYTES = 1 << 16
OUTLIVES_S = 60.0  # the trainer, at most
LOOKS_EVERY_S = 2.0

Open = Callable[[Opening, Mapping[str, str], Callable[[str], None]], Sink]


def open_tensorboard(opening: Opening, how: Mapping[str, str], _say: Callable[[str], None]) -> Sink:
    """Open TensorBoard's files."""
    from trainer.observe.sinks.tensorboard import TensorBoard

    return TensorBoard(opening, how["folder"])


def open_wandb(opening: Opening, how: Mapping[str, str], say: Callable[[str], None]) -> Sink:
    """Open a run of W&B."""
    from trainer.observe.sinks.weights_and_biases import WeightsAndBiases

    return WeightsAndBiases(opening, how["project"], how["name"], say)


def open_mlflow(opening: Opening, how: Mapping[str, str], _say: Callable[[str], None]) -> Sink:
    """Open a run of MLflow."""
    from trainer.observe.sinks.mlflow import Mlflow

    return Mlflow(opening, how["uri"], how["project"], how["name"])


def open_command(_opening: Opening, how: Mapping[str, str], say: Callable[[str], None]) -> Sink:
    """Open what runs a command at events."""
    from trainer.observe.sinks.command import Command

    return Command(how["command"], say)


SINKS: dict[str, Open] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "on-event": open_command,
}


def main(arguments: Sequence[str], sinks: Mapping[str, Open] = SINKS) -> int:
    """Feed a sink until stdin ends; return 0, or 1 if it could not be opened."""
    name, page = arguments[0], Page(int(arguments[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_after, args=(os.getppid(),), daemon=True).start()
    voice = Voice(page)
    batches = read_lines(sys.stdin.fileno())
    first: list[bytes] = next(batches, [])
    if not first:
        return 1
    start = json.loads(first[0])
    try:
        sink = sinks[name](Opening(**start["opening"]), start["how"], page.say)
    except BaseException as error:
        page.say(f"takes no lines: {cause_of(error)}")
        return 1
    feed(sink, [first[1:]], page, voice)
    feed(sink, batches, page, voice)
    voice.trying(sink.close, 0)
    return 0


class Voice:
    """Says the first fault of a sink, and counts what each of its faults loses."""

    def __init__(self, page: Page) -> None:
        self._page, self._has_spoken = page, False

    def trying(self, action: Callable[[], object], lines: int) -> bool:
        """Do what may fail; return whether it did not. So many lines are lost if it did."""
        try:
            action()
        except Exception as error:
            self._page.count(lost=lines)
            if not self._has_spoken:
                self._page.say(f"loses lines: {cause_of(error)}")
            self._has_spoken = True
            return False
        return True


def feed(sink: Sink, batches: Iterable[list[bytes]], page: Page, voice: Voice) -> None:
    """Hand a sink batches of lines; what it cannot take of one is lost, and it goes on with the next."""
    for batch in batches:
        written = 0
        for raw in batch:
            line = json.loads(raw)
            written += voice.trying(lambda line=line: sink.write(line), 1)  # type: ignore[misc]
        voice.trying(sink.flush, written)
        page.count(read=len(batch))


def read_lines(fd: int) -> Iterator[list[bytes]]:
    """Yield the whole lines of each read; the first batch begins with the first line."""
    rest = b""
    while data := os.read(fd, READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines


def cause_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500]


def end_after(trainer: int) -> None:
    """End this process some time after the trainer, if it has not ended by itself."""
    while os.getppid() == trainer:
        time.sleep(LOOKS_EVERY_S)
    time.sleep(OUTLIVES_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
