"""What `trainer train --dry-run` prints: a run's facts, and the memory of its ranks, with nothing started or written.

Parameters, gradients and optimizer state follow from the parameter table; padding aside, they are what a rank
allocates. Activations are an estimate: what the layers keep for the backward pass of the micro-batches in flight.
"""

from dataclasses import asdict, dataclass

import torch

from ckptkit import Coords, rank_stages
from datakit import unread_lines
from threefold.console import print_facts
from threefold.errors import EXIT_OK
from trainer.config import Config
from trainer.config.resolve import keeps_gathered, kv_replicas, layout_of, tiers_of
from trainer.data import open_blend, open_valid_blend, with_vocabulary
from trainer.engine import DTYPES
from trainer.mesh.layout import GROUPS, groups_needed
from trainer.model.stages import stage_flops, stage_ranges
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.pipeline.schedules import SCHEDULES, with_transfers
from trainer.pipeline.simulate import costs, simulate
from trainer.run.activations import activation_bytes, kept_by_choice
from trainer.run.banner import banner
from trainer.store.leases import LEASES, num_leased
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.plan import plan_buckets


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank of one pipeline stage needs on its device."""

    parameters: int
    gradients: int
    optimizer: int
    leases: int
    activations: int

    @property
    def total(self) -> int:
        """Return the bytes in all."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = " + ".join(
            f"{size_text(size)} {name}" for name, size in asdict(self).items() if size or name != "leases"
        )
        return f"{size_text(self.total)} = {parts} (estimated)"


def print_plan(config: Config) -> int:
    """Open the stores, print the facts of a run and the memory of a rank of each pipeline stage; return 0."""
    config = with_vocabulary(config)
    blend = open_blend(config)
    if config.train.eval_interval:
        open_valid_blend(config)
    cuda = config.train.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    facts = banner(config, device, blend, tiers_of(config))
    facts += [("not read", line) for line in unread_lines(blend)]
    for pp in range(config.parallel.pp):
        stages = " and ".join(map(str, rank_stages(layout_of(config), pp)))
        which = f"a rank of stage {stages}: " if config.parallel.pp > 1 else "a rank: "
        facts.append(("memory", which + str(rank_memory(config, pp))))
    kept = ", ".join(f"{choice} {size_text(size)}" for choice, size in kept_by_choice(config).items())
    facts.append(("kept", f"activations of a rank, at most, by train.recompute: {kept}"))
    if config.parallel.pp > 1:
        facts.append(("bubble", bubble(config)))
    print_facts([*facts, ("dry run", "nothing was started or written")])
    return EXIT_OK


def bubble(config: Config) -> str:
    """Return the share of a step in which ranks wait under the run's schedule, by the arithmetic of its stages."""
    parallel, num_microbatches = config.parallel, config.train.gradient_accumulation_steps
    schedule = SCHEDULES[parallel.schedule](parallel.pp, num_microbatches, parallel.virtual_stages)
    table, num_stages = parameter_table(config), layout_of(config).num_stages
    cost = costs(schedule, work=stage_flops(config, table, num_stages))
    shares = [simulate(with_transfers(schedule), each).bubble_share for each in (cost, None)]
    sizes = " + ".join(str(len(layers)) for layers in stage_ranges(config, table, num_stages))
    return (
        f"{shares[0]:.1%} of a step by the arithmetic of {sizes} layers and the head, {shares[1]:.1%} if all stages "
        "took as long: trainer schedule CONFIG.toml draws it"
    )


def rank_memory(config: Config, pp: int) -> RankMemory:
    """Return the memory of a rank on one pipeline stage of a resolved configuration."""
    parallel, layout = config.parallel, layout_of(config)
    dtype = DTYPES[config.train.precision]
    wide = wide_dtype(dtype)
    groups = groups_needed(layout, kv_replicas(config))
    sizes = {axes: len(groups[name][0]) for name, axes in GROUPS.items()}
    runs = local_runs(config, parameter_table(config), layout, Coords(pp=pp))
    moments = 2 if config.optim.moments == "bf16" else wide.itemsize
    master = 0 if wide == dtype else 2 if config.optim.master == "split" else wide.itemsize
    optimizer = sum(
        (-(-run.numel // sizes[run.holders]) if parallel.zero_stage else run.numel)
        * (len(OPTIMIZERS[run.optimizer].states) * moments + master)
        for run in runs
    )
    parameters = gradients = travelling = 0
    leased: dict[str, int] = {}  # elements of the buckets that are cut, by unit
    for bucket in plan_buckets(runs, parallel.bucket_mib << 20, dtype.itemsize):
        num_holders = sizes[bucket.runs[0].holders]
        size, is_cut = bucket.size(num_holders), bucket.is_cut(num_holders, parallel.zero_whole_kib << 10)
        parameters += size // num_holders if is_cut and parallel.zero_stage >= 3 else size
        gradients += size // num_holders if is_cut and parallel.zero_stage >= 2 else size
        travelling += size if num_holders > 1 and not (is_cut and parallel.zero_stage >= 2) else 0
        leased[bucket.runs[0].unit] = leased.get(bucket.runs[0].unit, 0) + size * is_cut
    of_gradients = num_leased(leased.values(), LEASES) if parallel.zero_stage >= 2 else 0
    most = len(leased) if keeps_gathered(config) else LEASES
    of_parameters = num_leased(leased.values(), most) if parallel.zero_stage >= 3 else 0
    if parallel.grad_reduce == "bf16":  # what this rank sends and what it receives
        gradients += 4 * (travelling + of_gradients) // wide.itemsize
    return RankMemory(
        parameters=parameters * dtype.itemsize,
        gradients=gradients * wide.itemsize,
        optimizer=optimizer,
        leases=of_parameters * dtype.itemsize + of_gradients * wide.itemsize,
        activations=activation_bytes(config, pp),
    )


def size_text(num_bytes: int) -> str:
    """Return a size in the unit that fits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
