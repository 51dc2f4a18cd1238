"""Faults of which token is meant: of its place, and of what it sees. See `faults`."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.parity import assert_parity, config_for, run_steps, small
from trainer.engine import Engine
from trainer.model.microbatch import MicroBatch
from trainer.verify.faults.planting import wrapping


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


TOKEN_FAULTS = [
    ShownFault("a token that is cut has a place of the wrong run", of_another_run("runs"), compare_cut),
    ShownFault("labels that are cut are of the wrong run", of_another_run("labels_S"), compare_cut),
    ShownFault("losses that are cut have weights of the wrong run", of_another_run("loss_mask_S"), compare_cut),
    ShownFault("positions that are cut are of the wrong run", of_another_run("positions_S"), compare_cut),
    ShownFault("documents that are cut are of the wrong run", of_another_run("documents"), compare_cut),
]
