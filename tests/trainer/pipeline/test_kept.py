"""What a step of a pipeline keeps of real stages: outputs and gradients until they are sent, few micro-batches live."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network, Work
from trainer.pipeline.actions import most_sends, peak_live
from trainer.pipeline.executor import Executor
from trainer.pipeline.schedules import rank_actions
from trainer.verify.threads import run_threads

CASES = [
    ("pp3", "1f1b"),
    ("pp2-virtual2", "zb-h1"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("pp2", "gpipe"), ("pp3", "zb-h1"), ("pp3-virtual2", "1f1b"), ("tp2-pp2", "1f1b"))
    ),
]


class Sent:
    """The memory of all that one executor was asked to send, and how much of it was there at once."""

    def __init__(self) -> None:
        self.memory: list[StorageWeakRef] = []
        self.peak = 0

    def note(self, tensor: torch.Tensor) -> None:
        self.memory.append(StorageWeakRef(tensor.untyped_storage()))
        self.peak = max(self.peak, self.num_alive)

    @property
    def num_alive(self) -> int:
        return sum(not memory.expired() for memory in self.memory)


def step(rank: int, config: Config, *, network: Network) -> tuple[int, int, int, int]:
    engine = make_engine(rank, config, network=network)
    sent, link_of = Sent(), engine.pipeline._link_of

    class Link:
        """A link that notes what is sent."""

        def __init__(self, link: Any) -> None:
            self.link, self.name, self.ranks, self.index = link, link.name, link.ranks, link.index

        def send(self, tensor: torch.Tensor, to: int) -> Work:
            sent.note(tensor)
            return self.link.send(tensor, to)

        def receive(self, tensor: torch.Tensor, source: int) -> Work:
            return self.link.receive(tensor, source)

    engine.pipeline._link_of = lambda action: Link(link_of(action))  # type: ignore[return-value, assignment]
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    return len(sent.memory), sent.peak, sent.num_alive, engine.pipeline.peak_live


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_what_was_sent_is_freed_and_few_passes_are_live(layout: str, schedule: Any, recompute: Any) -> None:
    config = small(config_for("llama", ParallelLayout.parse(layout)))
    config = replace(
        config,
        parallel=replace(config.parallel, schedule=schedule), train=replace(config.train, recompute=recompute),
        model=replace(config.model, num_layers=6),
    )  # fmt: skip
    built = layout_of(config)
    num_microbatches = config.train.gradient_accumulation_steps
    num_links = 2 if built.virtual > 1 else 1  # to a neighbour; on one of them all that is sent
    for rank, (num_sent, peak, num_left, live) in enumerate(run_threads(built.world_size, step, config)):
        assert num_sent >= num_microbatches
        assert peak <= 2 * num_links * most_sends(built.pp, built.num_stages), "of activations, and of gradients"
        assert peak < num_sent
        assert num_left == 0
        row = rank_actions(schedule, built.pp, num_microbatches, built.virtual, built.coords(rank).pp)
        assert live == peak_live(row)


def test_an_output_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept = Executor._forward, []

    def forward(self: Executor[Any], *args: Any, **options: Any) -> torch.Tensor:
        kept.append(real(self, *args, **options))
        return kept[-1]

    monkeypatch.setattr(Executor, "_forward", forward)
    with pytest.raises(AssertionError):
        test_what_was_sent_is_freed_and_few_passes_are_live("pp2", "1f1b", "none")
