"""Faults of which token is meant: of its place, and of what it sees."""

from dataclasses import replace
from typing import Any

from trainer.engine import Engine
from trainer.model import op_choices
from trainer.model.block import Block
from trainer.model.chunk import Chunk
from trainer.model.microbatch import MicroBatch
from trainer.parallel import tensor
from trainer.verify.faults.fault import PP, TP, Fault
from trainer.verify.faults.planting import Patch, wrapping

WINDOWS = {"window": 2, "window_every": 2}


def rows_turned(batch: MicroBatch) -> MicroBatch:
    """Return the same micro-batch with its rows in the other order: as many runs as rows."""
    length, parts = batch.seq_length, {}
    for name in ("tokens_S", "labels_S", "positions_S", "loss_mask_S", "groups_S"):
        if (x_S := getattr(batch, name)) is not None:
            parts[name] = x_S.unflatten(0, (-1, length)).flip(0).flatten()
    [run] = batch.runs
    runs = tuple(run[start : start + length] for start in range(len(run) - length, -1, -length))
    return replace(batch, runs=runs, **parts)


def turning_rows(patch: Patch) -> None:
    """Let every engine have its rows in the other order, which changes nothing."""
    wrapping(
        Engine, "_microbatches", lambda real, *args, **named: [rows_turned(each) for each in real(*args, **named)]
    )(patch)


def runs_change_places(patch: Patch) -> None:
    turning_rows(patch)
    wrapping(tensor, "share_of", lambda real, runs, *sizes: real(runs[::-1], *sizes))(patch)


def one_more(real: Any, config: Any) -> Any:
    return tuple(window and window + 1 for window in real(config))


def one_less(real: Any, config: Any) -> Any:
    return tuple(window and window - 1 for window in real(config))


def turned(real: Any, config: Any) -> Any:
    return real(config)[::-1]


def over_documents(real: Any, self: MicroBatch, window: int | None, *own: Any) -> Any:
    return real(self if window is None else replace(self, documents=None), window, *own)


def masks_of_the_layer_above(patch: Patch) -> None:
    def init(real: Any, self: Block, model: Any, store: Any, number: int, *rest: Any) -> None:
        real(self, model, store, number, *rest)
        self.attention.window = self.attention.choices.windows[(number + 1) % 2]

    wrapping(Block, "__init__", init)(patch)


def masks_from_zero(patch: Patch) -> None:
    def init(real: Any, self: Chunk, *args: Any) -> None:
        real(self, *args)
        for number, block in enumerate(self.blocks):
            block.attention.window = block.attention.choices.windows[number]

    wrapping(Chunk, "__init__", init)(patch)


def one_mask_a_batch(patch: Patch) -> None:
    masks: dict[int, Any] = {}
    wrapping(MicroBatch, "masks", lambda real, self, *own: masks.setdefault(id(self), real(self, *own)))(patch)


TOKEN_FAULTS = (
    Fault(
        "place-of-wrong-run",
        "a token has a place of the wrong run",
        TP,
        runs_change_places,
        micro_batch_size=2,
        cuts_tokens=True,
    ),
    Fault(
        "mask-of-the-layer-above",
        "a layer has the mask of the layer above",
        None,
        masks_of_the_layer_above,
        model=WINDOWS,
    ),
    Fault(
        "mask-of-the-first-layer",
        "the layers of a batch share the mask of the first",
        None,
        one_mask_a_batch,
        model=WINDOWS,
    ),
    Fault("masks-numbered-in-stage", "masks number layers within a stage", PP, masks_from_zero, model=WINDOWS),
    Fault(
        "window-one-longer",
        "a window is off by one",
        None,
        wrapping(op_choices, "layer_windows", one_more),
        model=WINDOWS,
    ),
    Fault(
        "window-one-shorter",
        "a window ends a token early",
        None,
        wrapping(op_choices, "layer_windows", one_less),
        model=WINDOWS,
    ),
    Fault(
        "window-every-from-zero",
        "layers that see all are counted from zero",
        None,
        wrapping(op_choices, "layer_windows", turned),
        model=WINDOWS,
    ),
    Fault(
        "window-over-documents",
        "a window goes on before the begin of a document",
        None,
        wrapping(MicroBatch, "masks", over_documents),
        model=WINDOWS,
        documents=True,
    ),
)
