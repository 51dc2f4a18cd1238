"""StoreOptions: how a store keeps its state, as follows from a configuration."""

from dataclasses import dataclass

import torch

from trainer.config import Config
from trainer.config.optim import MuonScale
from trainer.config.resolve import keeps_gathered
from trainer.ops.dtypes import wide_dtype


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store keeps its state: `zero_stage` says what the holders cut, `splits_master` keeps no fp32.

    They cut the optimizer state from stage 1 on, gradients from 2 and parameters from 3, these two inside each replica
    and but for buckets of less than `whole_bytes`. `keeps_gathered` keeps parameters until the end of the step.
    `summed` is the dtype in which gradients travel to their owners, who add in the wide one; into int8 they are rounded
    by place under a `seed`. `overlaps_reduce` sums gradients beside the backward, `overlaps_gather` updates and gathers
    beside what follows.
    """

    dtype: torch.dtype
    moments: torch.dtype
    summed: torch.dtype
    seed: int
    bucket_bytes: int
    zero_stage: int
    whole_bytes: int
    keeps_gathered: bool
    with_optimizer: bool
    splits_master: bool
    muon_scale: MuonScale
    overlaps_reduce: bool
    overlaps_gather: bool

    @classmethod
    def of(cls, config: Config, dtype: torch.dtype, *, with_optimizer: bool) -> "StoreOptions":
        """Return those of a resolved configuration."""
        parallel, wide = config.parallel, wide_dtype(dtype)
        return cls(
            dtype,
            torch.bfloat16 if config.optim.moments == "bf16" else wide,
            {"wide": wide, "bf16": torch.bfloat16, "int8": torch.int8}[parallel.grad_reduce],
            config.train.seed,
            parallel.bucket_mib << 20,
            zero_stage=parallel.zero_stage,
            whole_bytes=parallel.zero_whole_kib << 10,
            keeps_gathered=keeps_gathered(config),
            with_optimizer=with_optimizer,
            splits_master=config.optim.master == "split",
            muon_scale=config.optim.muon_scale,
            overlaps_reduce=parallel.overlap_grad_reduce,
            overlaps_gather=parallel.overlap_param_gather,
        )

    @property
    def sharded(self) -> bool:
        """Return whether each holder updates its own interval alone."""
        return self.zero_stage > 0
