"""What `trainer train --dry-run` prints: facts of a run, and the memory of its ranks; nothing is started or written."""

import torch

from ckptkit import rank_stages
from datakit import unread_lines
from threefold.console import log, print_facts
from threefold.errors import EXIT_OK
from trainer.config import Config
from trainer.config.resolve import batch_sizes, layout_of, tiers_of
from trainer.data import open_blend, with_vocabulary
from trainer.model.stages import stage_flops, stage_ranges
from trainer.model.table import parameter_table
from trainer.pipeline.schedules import SCHEDULES, with_transfers
from trainer.pipeline.simulate import costs, simulate
from trainer.run.activations import host_bytes, kept_by_choice
from trainer.run.banner import banner
from trainer.run.expert_rows import rows_text
from trainer.run.memory import arena_bytes, offloaded_bytes, rank_memory, size_text
from trainer.run.memory_check import Plan, check_memory, device_memory
from trainer.run.valid_sets import open_valid_sets


def print_plan(config: Config, device_bytes: int = 0) -> int:
    """Open the stores, print the facts of a run and the memory of a rank of each pipeline stage; return 0.

    UserError if a rank takes more than `device_bytes`, by default those of the GPU here, if there is one.
    """
    config = with_vocabulary(config)
    blend = open_blend(config)
    if config.train.eval_interval:
        open_valid_sets(config, log)
    cuda = config.train.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    facts = banner(config, device, blend, tiers_of(config))
    facts += [("not read", line) for line in unread_lines(blend)]
    for pp in range(config.parallel.pp):
        stages = " and ".join(map(str, rank_stages(layout_of(config), pp)))
        which = f"a rank of stage {stages}: " if config.parallel.pp > 1 else "a rank: "
        facts.append(("memory", which + str(rank_memory(config, pp))))
    device_bytes = device_bytes or device_memory(device)
    if config.parallel.ep > 1:
        facts.append(("rows", rows_text(config, device_bytes)))
    if config.optim.offload and (of_host := max(offloaded_bytes(config, pp) for pp in range(config.parallel.pp))):
        facts.append(("host", f"{size_text(of_host)} of memory a rank for masters and moments"))
    if of_host := max(host_bytes(config, pp) for pp in range(config.parallel.pp)):
        facts.append(("host", f"{size_text(of_host)} of memory a rank for inputs of layers"))
    if config.checkpoint.save:
        arena = max(arena_bytes(config, pp) for pp in range(config.parallel.pp))
        facts.append(("host", f"{size_text(arena)} of memory a rank for saves (--checkpoint.window-mib bounds it)"))
    kept = ", ".join(f"{choice} {size_text(size)}" for choice, size in kept_by_choice(config).items())
    facts.append(("kept", f"activations of a rank, at most, by train.recompute: {kept}"))
    if config.parallel.pp > 1:
        facts.append(("bubble", bubble(config)))
    if (left := device_bytes - Plan(config).total) >= 0:
        facts.append(("fits", f"{size_text(left)} of {size_text(device_bytes)} of a device are left"))
    print_facts([*facts, ("dry run", "nothing was started or written")])
    check_memory(config, device_bytes, log)
    return EXIT_OK


def bubble(config: Config) -> str:
    """Return the share of a step in which ranks wait under the run's schedule, by the arithmetic of its stages."""
    parallel, train = config.parallel, config.train
    table, num_stages = parameter_table(config), layout_of(config).num_stages
    work, sizes = stage_flops(config, table, num_stages), batch_sizes(config)

    def shares(num_microbatches: int) -> tuple[float, float]:
        schedule = SCHEDULES[parallel.schedule](parallel.pp, num_microbatches, parallel.virtual_stages)
        cost, rows = costs(schedule, work=work), with_transfers(schedule)
        return simulate(rows, cost).bubble_share, simulate(rows).bubble_share

    by_work, if_equal = shares(train.gradient_accumulation_steps)
    layers = " + ".join(str(len(layers)) for layers in stage_ranges(config, table, num_stages))
    smallest = sizes.sizes[0] // (train.micro_batch_size * parallel.dp)
    at_first = f" ({shares(smallest)[0]:.1%} with the {smallest} micro-batches of the first steps)" * bool(sizes.rampup)
    return (
        f"{by_work:.1%} of a step{at_first} by the arithmetic of {layers} layers and the head, {if_equal:.1%} if all "
        "stages took as long: trainer schedule CONFIG.toml draws it"
    )
