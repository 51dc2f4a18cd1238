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
from trainer.config.resolve import cuts_tokens, kv_replicas, layout_of, longest_row, schedule_of, tiers_of
from trainer.data import open_blend, open_valid_blend, with_vocabulary
from trainer.engine import DTYPES
from trainer.mesh.layout import GROUPS, groups_needed
from trainer.model.stages import stage_flops, stage_ranges
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.pipeline.actions import peak_live
from trainer.pipeline.schedules import SCHEDULES, rank_actions, with_transfers
from trainer.pipeline.simulate import costs, simulate
from trainer.run.banner import banner
from trainer.store.optimizers import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank of one pipeline stage needs on its device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Return the bytes in all."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = " + ".join(f"{size_text(size)} {name}" for name, size in asdict(self).items())
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
    held = sum(run.numel for run in runs)
    moments = 2 if config.optim.moments == "bf16" else wide.itemsize
    master = 0 if wide == dtype else 2 if config.optim.master == "split" else wide.itemsize
    optimizer = sum(
        (-(-run.numel // sizes[run.holders]) if parallel.zero_stage else run.numel)
        * (len(OPTIMIZERS[run.optimizer].states) * moments + master)
        for run in runs
    )
    travelling = sum(run.numel for run in runs if sizes[run.holders] > 1) if parallel.grad_reduce == "bf16" else 0
    return RankMemory(
        held * dtype.itemsize,
        held * wide.itemsize + 4 * travelling,  # what this rank sends and what it receives
        optimizer,
        activation_bytes(config, pp),
    )


def activation_bytes(config: Config, pp: int) -> int:
    """Return about what a rank keeps for the backward passes, of the passes that the schedule keeps live.

    A layer keeps 4 tensors as wide as the residual stream (of this rank's tokens, if they are cut), queries, keys,
    values and their result, and what the MLP's nonlinearity reads, which SwiGLU makes twice as wide. The last stage
    also keeps the logits, or at most train.max_logits_gib of them and the gradient of their input. From B to W the
    nonlinearity's result is kept too, and of inputs and gradients of cut linears all tokens; besides the
    gradients of this rank's tokens for biases that are added after a sum, and for the embedding.
    """
    model, parallel, train = config.model, config.parallel, config.train
    dtype, layout = DTYPES[train.precision], layout_of(config)
    q_size, kv_size = model.head_size * model.num_heads, model.head_size * model.num_kv_heads
    inside = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size
    hidden = model.hidden_size // (parallel.tp if cuts_tokens(config) else 1)
    within = (2 * q_size + 2 * kv_size + inside) // parallel.tp
    layer = hidden if train.recompute == "full" else 4 * hidden + within
    layer_until_w = 4 * model.hidden_size + within + model.ffn_hidden_size // parallel.tp
    layer_until_w += 2 * hidden * (model.bias and cuts_tokens(config))
    ranges = stage_ranges(config, parameter_table(config), layout.num_stages)
    num_layers = max(len(ranges[stage]) for stage in rank_stages(layout, pp))
    row = rank_actions(schedule_of(config), parallel.pp, train.gradient_accumulation_steps, parallel.virtual_stages, pp)
    num_tokens = train.micro_batch_size * longest_row(config)
    num_bytes = num_tokens * dtype.itemsize  # of one number a token of a micro-batch
    kept = num_layers * num_bytes * peak_live(row, layer, layer_until_w)
    kept += hidden * num_bytes * (pp == 0 and any(action.kind == "W" for action in row))
    if pp == parallel.pp - 1:
        in_flight = peak_live([action for action in row if action.stage == layout.num_stages - 1])
        logits, most = model.vocab_size // parallel.tp * num_bytes, train.max_logits_gib * 2**30
        is_cut = 0 < most < logits
        kept += int(most) + model.hidden_size * num_bytes * in_flight if is_cut else logits * in_flight
    return kept


def size_text(num_bytes: int) -> str:
    """Return a size in the unit that fits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
