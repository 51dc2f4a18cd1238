"""Faults of pipeline stages: what they send, in which order they work, and what two of them hold."""

from functools import cache
from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer import engine
from trainer.engine import Engine
from trainer.mesh.group import Group
from trainer.model import chunk
from trainer.model.chunk import Chunk
from trainer.pipeline.executor import Executor
from trainer.verify.faults.fault import PP, Fault
from trainer.verify.faults.gradients import own_norm
from trainer.verify.faults.planting import in_one_buffer, read_at_once, skipping, wrapping


def layers_from_zero(real: Any, self: Chunk, *args: Any) -> None:
    real(self, *args)
    for number, block in enumerate(self.blocks):
        block.number = number


def swapped(real: Any, name: str, *sizes: int) -> Any:
    swap = {0: 1, 1: 0} if sizes[-1] else {}  # on all ranks but the first
    actions = real(name, *sizes)
    return [action._replace(microbatch=swap.get(action.microbatch, action.microbatch)) for action in actions]


def one_buffer(real: Any, self: Executor[Any], link_of: Any, new_buffer: Any, *rest: Any, **options: Any) -> None:
    buffer = cache(new_buffer)
    real(self, link_of, lambda: buffer().data, *rest, **options)


def stages_2_and_4_swapped(real: Any, *arguments: Any) -> list[range]:
    ranges = real(*arguments)
    return [ranges[{2: 4, 4: 2}.get(stage, stage)] for stage in range(len(ranges))]


def first_dropped(real: Any, self: Engine, name: str, batches: Any, reduce_loss: Any) -> torch.Tensor:
    """Let the first micro-batch of a stage ask nothing."""
    is_cut = self.mesh.layout.pp > 1
    return real(
        self, name, batches, lambda losses, batch: reduce_loss(losses, batch) * (not is_cut or batch is not batches[0])
    )


def first_layer_lost(real: Any, self: Chunk, received_TD: Any, batch: Any) -> torch.Tensor:
    """Let a stage behind the first skip its first block."""
    if received_TD is None:
        return real(self, received_TD, batch)
    blocks, self.blocks = self.blocks, self.blocks[1:]
    try:
        return real(self, received_TD, batch)
    finally:
        self.blocks = blocks


STAGE_FAULTS = (
    Fault(
        "tied-not-summed",
        "tied gradients are not summed over the ends",
        PP,
        skipping("reduce_scatter", "cp.dp.ends"),
        peer="NVIDIA/Megatron-LM#7452",
    ),
    Fault("tied-head-stale", "the tied head does not get the new values", PP, skipping("all_gather", "cp.dp.ends")),
    Fault(
        "dropout-numbers-stage-layers",
        "dropout numbers layers within a stage",
        PP,
        wrapping(Chunk, "__init__", layers_from_zero),
    ),
    Fault(
        "microbatches-swapped",
        "the last stage takes two micro-batches in another order",
        PP,
        wrapping(engine, "rank_actions", swapped),
    ),
    Fault(
        "first-microbatch-dropped",
        "the last stage drops its first micro-batch",
        PP,
        wrapping(Engine, "_run", first_dropped),
    ),
    Fault("clip-by-stage", "each stage clips by its own norm", PP, wrapping(Group, "all_reduce", own_norm)),
    Fault(
        "activations-read-early",
        "activations are read before they are received",
        PP,
        read_at_once("receive", "activations"),
        peer="NVIDIA/Megatron-LM#7400",
    ),
    Fault(
        "gradients-received-late",
        "gradients are read before they are received",
        PP,
        read_at_once("receive", "gradients"),
    ),
    Fault("sends-share-a-buffer", "tensors that are being sent share a buffer", PP, in_one_buffer("send")),
    Fault(
        "receive-over-deferred",
        "the next gradient is received where a W reads",
        ParallelLayout(pp=3),
        wrapping(Executor, "__init__", one_buffer),
        model={"num_layers": 3},
        schedule="zb-h1",
    ),
    Fault(
        "stages-swapped",
        "two stages of a rank change places",
        ParallelLayout(pp=2, virtual=3),
        wrapping(chunk, "stage_ranges", stages_2_and_4_swapped),
        model={"num_layers": 6},
    ),
    Fault(
        "virtual-microbatches-swapped",
        "the last rank takes two micro-batches of both its stages in another order",
        ParallelLayout(pp=2, virtual=2),
        wrapping(engine, "rank_actions", swapped),
        model={"num_layers": 4},
    ),
    Fault(
        "first-layer-of-stage-lost",
        "a stage behind the first skips its first layer",
        PP,
        wrapping(Chunk, "hidden", first_layer_lost),
        trips="has not come",
    ),
)
