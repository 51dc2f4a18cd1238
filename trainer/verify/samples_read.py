"""The check of which samples steps read: those of one process, as many as the run asks for."""

import math

import numpy as np

from datakit import HostBatch
from trainer.config import TrainConfig
from trainer.verify.bench import Bench
from trainer.verify.difference import Different
from trainer.verify.result import Figure


def samples(bench: Bench) -> Figure:
    """Compare the samples that the data-parallel ranks read in each step with those that one process reads.

    Where the batch grows, the number of samples is compared with Megatron-LM's rule, in whole numbers.
    """
    number = 0
    whole = bench.whole_stream.batches[0]
    for step, expected in enumerate(whole):
        _compare_size(bench.config.train, number, step, expected)
        rows = [batches[step] for batches in bench.stream.batches]
        for name in ("tokens", "labels", "positions", "loss_mask"):
            parts = np.stack([getattr(each, name) for each in rows], axis=1)  # [micro-batches, ranks, rows, tokens]
            own = parts.reshape(getattr(expected, name).shape)
            differs = (own != getattr(expected, name)).any(-1).flatten()
            if differs.any():
                first = number + int(differs.argmax())
                raise Different(f"{name} of sample {first} of step {step + 1} are others than those of one process")
        number += math.prod(expected.shape[:2])
    return Figure(f"{number} samples", "equal")


def _compare_size(train: TrainConfig, num_read: int, step: int, batch: HostBatch) -> None:
    """Raise Different if a step, before which so many samples were read, has another number of samples."""
    wanted = train.global_batch_size
    if train.rampup_batch_size and num_read <= (ramp := train.rampup_batch_size)[2]:
        wanted = ramp[0] + num_read * ((wanted - ramp[0]) // ramp[1]) // ramp[2] * ramp[1]
    if (size := math.prod(batch.shape[:2])) != wanted:
        raise Different(f"step {step + 1} has {size} samples, and {wanted} behind {num_read} samples")
