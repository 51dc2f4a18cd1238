"""The other processes of a crash test, which are raced or killed: `python -m ckptkit.check.crash_child`.

The first line of standard input is an Order. A process that races takes a line for each race, the key and the moment
of the monotonic clock at which to write, and answers `won`, `lost` or what failed. One that saves goes on until it is
killed, with a line before and a line after each save.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Piece, Placement, TensorInfo
from ckptkit.saving.save import save
from threefold.errors import EXIT_OK, UserError
from threefold.storage import AlreadyExists, open_storage

SAVING, SAVED, READY, WON, LOST = "saving", "saved", "ready", "won", "lost"
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Order:
    """What a process does: save steps from `step` on, each of `size_bytes`, or race under the name `racer`."""

    address: str
    racer: str = ""
    step: int = 0
    size_bytes: int = 0

    def encode(self) -> str:
        """Return the order as a line. Its address may hold a password, so no command line has it."""
        return f"{json.dumps(asdict(self))}\n"


def table(size_bytes: int) -> list[TensorInfo]:
    """Return the tensors of the checkpoint that is saved."""
    return [TensorInfo("state", "F32", (size_bytes // ITEM_BYTES,), Placement("first"))]


def pieces(values: npt.NDArray[np.float32]) -> list[Piece]:
    """Return the checkpoint's one piece in some memory."""
    return [Piece("state", Box.whole(values.shape), 0, values.size, values)]


def values_of(step: int, size_bytes: int) -> npt.NDArray[np.float32]:
    """Return the values of a step, which no other has."""
    return np.arange(size_bytes // ITEM_BYTES, dtype=np.float32) * np.float32(step)


def main() -> int:
    """Take the order, and do it."""
    order = Order(**json.loads(sys.stdin.readline()))
    try:
        if order.racer:
            _race(order)
        else:
            _save(order)
    except UserError as error:
        _say(f"failed: {error.message}")
        return error.exit_code
    return EXIT_OK


def _race(order: Order) -> None:
    storage, value = open_storage(order.address), order.racer.encode()
    _say(READY)
    for line in sys.stdin:
        key, moment = line.split()
        while time.monotonic() < float(moment):
            pass
        try:
            storage.write(key, value, if_absent=True)
        except AlreadyExists:
            _say(LOST)
        else:
            _say(WON)


def _save(order: Order) -> None:
    step, layout = order.step, ParallelLayout()
    while True:
        values = values_of(step, order.size_bytes)
        _say(f"{SAVING} {step}")
        tensors = table(order.size_bytes)
        save(order.address, step, pieces(values), tensors=tensors, layout=layout, num_layers=1, metadata={})
        _say(f"{SAVED} {step}")
        step += 1


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
