"""Faults of which token is meant: of its place, and of what it sees. See `faults`."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import PP, TP, Fault, Patch, wrapping
from tests.trainer.support.parity import assert_parity, config_for, run_steps, small
from trainer.engine import Engine
from trainer.model import op_choices
from trainer.model.block import Block
from trainer.model.chunk import Chunk
from trainer.model.microbatch import MicroBatch
from trainer.parallel import tensor

WINDOWS = {"window": 2, "window_every": 2}


def rows_turned(batch: MicroBatch) -> MicroBatch:
    """The same micro-batch with its rows in the other order: as many runs as rows."""
    length, parts = batch.seq_length, {}
    for name in ("tokens_S", "labels_S", "positions_S", "loss_mask_S", "groups_S"):
        if (x_S := getattr(batch, name)) is not None:
            parts[name] = x_S.unflatten(0, (-1, length)).flip(0).flatten()
    [run] = batch.runs
    runs = tuple(run[start : start + length] for start in range(len(run) - length, -1, -length))
    return replace(batch, runs=runs, **parts)


def turning_rows(patch: Patch) -> None:
    """Let every engine have its rows in the other order, which is no fault."""
    wrapping(
        Engine, "_microbatches", lambda real, *args, **named: [rows_turned(each) for each in real(*args, **named)]
    )(patch)


def runs_change_places(patch: Patch) -> None:
    turning_rows(patch)
    wrapping(tensor, "share_of", lambda real, runs, *sizes: real(runs[::-1], *sizes))(patch)


def documents_in_turn(batch: MicroBatch) -> list[MicroBatch]:
    """The same micro-batch as two, with every other document each."""
    bounds, _ = batch.documents or ([], 0)
    [run] = batch.runs
    found = [run[start:stop] for start, stop in pairwise(map(int, bounds))]
    return [batch.cut(tuple(runs)) for runs in (found[::2], found[1::2]) if runs]


def compare_cut() -> None:
    """Documents that are cut from their micro-batch train as they do in it."""
    config = small(config_for("gpt2", ParallelLayout()))
    config = replace(
        config,
        data=replace(config.data, document_mask=True),
        train=replace(config.train, micro_batch_size=4, gradient_accumulation_steps=4),
    )
    expected = run_steps(0, config, 2)

    def cut(real: Any, *args: Any, **named: Any) -> list[MicroBatch]:
        return [part for each in real(*args, **named) for part in documents_in_turn(each)]

    with pytest.MonkeyPatch.context() as patch:
        wrapping(Engine, "_microbatches", cut)(patch)
        assert_parity([run_steps(0, config, 2)], expected)


def of_another_run(*fields: str) -> Any:
    """Let parts of what is cut be of the runs in another order."""

    def cut(real: Any, self: MicroBatch, runs: Any) -> MicroBatch:
        if runs == self.runs:
            return self
        wrong = real(self, runs[::-1])
        return replace(real(self, runs), **{name: getattr(wrong, name) for name in fields})

    return wrapping(MicroBatch, "cut", cut)


def one_more(real: Any, config: Any) -> Any:
    return tuple(window and window + 1 for window in real(config))


def one_less(real: Any, config: Any) -> Any:
    return tuple(window and window - 1 for window in real(config))


def turned(real: Any, config: Any) -> Any:
    return real(config)[::-1]


def over_documents(real: Any, self: MicroBatch, **own: Any) -> Any:
    return real(self if own["window"] is None else replace(self, documents=None), **own)


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
    wrapping(MicroBatch, "mask", lambda real, self, **own: masks.setdefault(id(self), real(self, **own)))(patch)


TOKEN_FAULTS = [
    Fault("a token has a place of the wrong run", TP, runs_change_places, cuts_tokens=True, micro_batch_size=2),
    Fault("a token that is cut has a place of the wrong run", None, of_another_run("runs"), shows=compare_cut),
    Fault("labels that are cut are of the wrong run", None, of_another_run("labels_S"), shows=compare_cut),
    Fault("losses that are cut have weights of the wrong run", None, of_another_run("loss_mask_S"), shows=compare_cut),
    Fault("positions that are cut are of the wrong run", None, of_another_run("positions_S"), shows=compare_cut),
    Fault("documents that are cut are of the wrong run", None, of_another_run("documents"), shows=compare_cut),
    Fault("a layer has the mask of the layer above", None, masks_of_the_layer_above, model=WINDOWS),
    Fault("the layers of a batch share the mask of the first", None, one_mask_a_batch, model=WINDOWS),
    Fault("masks number layers within a stage", PP, masks_from_zero, model=WINDOWS),
    Fault("a window is off by one", None, wrapping(op_choices, "layer_windows", one_more), model=WINDOWS),
    Fault("a window ends a token early", None, wrapping(op_choices, "layer_windows", one_less), model=WINDOWS),
    Fault(
        "layers that see all are counted from zero", None, wrapping(op_choices, "layer_windows", turned), model=WINDOWS
    ),
    Fault(
        "a window goes on before the begin of a document",
        None,
        wrapping(MicroBatch, "mask", over_documents),
        model=WINDOWS,
        documents=True,
    ),
]
