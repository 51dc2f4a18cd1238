"""How long a step takes by the rates of a GPU, part by part; the schedule is simulated as `trainer schedule` does.

Products and attention take their operations, other kernels and the update their bytes. Transfers of tokens are
exposed but for what the run's code multiplies beside them; sums and gathers of weights are as far as the arithmetic
beside them is shorter. A rank waits for the slowest stage. Parts add up to the step.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product

from ckptkit import Coords
from trainer.config import Config
from trainer.config.resolve import kv_replicas, layout_of, schedule_of
from trainer.mesh.layout import groups_needed
from trainer.model.table import local_runs, parameter_table
from trainer.pipeline.actions import Action
from trainer.pipeline.schedules import all_actions
from trainer.pipeline.simulate import simulate
from trainer.plan.passes import Pass, stage_passes
from trainer.plan.rates import Rates
from trainer.plan.store_moves import store_moves
from trainer.plan.token_calls import TokenCalls
from trainer.plan.updates import update_s
from trainer.plan.volumes import Volumes
from trainer.run.activations import Sizes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, by what they are for."""

    products: float
    attention: float
    other_kernels: float
    exposed_transfers: float
    bubble: float
    update: float
    host: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(asdict(self).values())


def step_time(config: Config, rates: Rates, volumes: Volumes) -> StepTime:
    """Return the time of a step of a resolved run."""
    number, pp = config.train.gradient_accumulation_steps, config.parallel.pp
    puts_off = pp > 1 and config.parallel.schedule == "zb-h1"
    passes = stage_passes(config, rates, TokenCalls(volumes, rates, group_places(config), puts_off))
    if config.parallel.zero_stage > 1:
        add_store_calls(config, rates, passes)
    stages_of = [range(rank, layout_of(config).num_stages, pp) for rank in range(pp)]
    busy = [sum(passes[kind, stage].total for kind in "FB" for stage in stages) for stages in stages_of]
    slowest = max(range(pp), key=busy.__getitem__)
    own = [passes[kind, stage] for kind in "FB" for stage in stages_of[slowest]]
    pipeline = pipeline_s(config, rates, passes, busy[slowest])
    sums = store_s(config, rates, slowest, busy[slowest] * number)
    forward = sum(passes["F", stage].total for stage in stages_of[slowest])
    computed = sum(stage_pass.computed for stage_pass in own)
    return StepTime(
        products=number * sum(stage_pass.products for stage_pass in own),
        attention=number * sum(stage_pass.attention for stage_pass in own),
        other_kernels=number * sum(stage_pass.other for stage_pass in own),
        exposed_transfers=number * sum(stage_pass.transfers for stage_pass in own) + sums,
        bubble=pipeline - number * busy[slowest],
        update=update_s(config, rates, group_places(config), slowest, forward),
        host=number * (busy[slowest] - computed),
    )


def add_store_calls(config: Config, rates: Rates, passes: Mapping[tuple[str, int], Pass]) -> None:
    """Add to passes what the host takes to gather weights for them, and to sum gradients behind them.

    Of 12 gathers in a step of 3 micro-batches on one stage each pass has 2.
    """
    parallel, table, layout = config.parallel, parameter_table(config), layout_of(config)
    number, places = config.train.gradient_accumulation_steps, group_places(config)
    for pp in range(parallel.pp):
        stages = range(pp, layout.num_stages, parallel.pp)
        for move in store_moves(config, local_runs(config, table, layout, Coords(pp=pp)), places):
            ways = "FB" if move.kind == "all_gather" else "B"
            for way, stage in product(ways if move.is_of_pass else "", stages):
                times = move.times / number / len(ways) / len(stages)
                passes[way, stage].host += times * rates.call_host_s()


def pipeline_s(config: Config, rates: Rates, passes: Mapping[tuple[str, int], Pass], busy: float) -> float:
    """Return how long the passes of a step take under its schedule; beyond some, a micro-batch adds the slowest rank's.

    With pp 4 and 100 micro-batches 16 are simulated, and 84 times the slowest rank's passes are added.
    """
    parallel, number = config.parallel, config.train.gradient_accumulation_steps
    if parallel.pp == 1:
        return number * busy
    few = min(number, 4 * parallel.pp)
    schedule = all_actions(schedule_of(config), parallel.pp, few, parallel.virtual_stages)
    stream = Sizes.of(config).stream
    span = layout_of(config).world_size // parallel.pp
    transfer = rates.call_s("send", stream, 2, span + 1)
    has_w = any(action.kind == "W" for row in schedule for action in row)

    def cost(action: Action) -> float:
        if action.kind not in ("F", "B", "W"):
            return transfer
        if action.kind == "F":
            return passes["F", action.stage].total
        weights = passes["B", action.stage].weights if has_w else 0.0
        return weights if action.kind == "W" else passes["B", action.stage].total - weights

    return simulate(schedule, cost).duration + (number - few) * busy


def group_places(config: Config) -> dict[str, tuple[int, int]]:
    """Return how many ranks are in a group, and over how many neighbouring ones it reaches, by its name."""
    groups = groups_needed(layout_of(config), kv_replicas(config), config.parallel.dp_shard)
    first = {name: members[0] for name, members in groups.items() if members}
    return {name: (len(ranks), ranks[-1] - ranks[0] + 1) for name, ranks in first.items()}


def store_s(config: Config, rates: Rates, pp: int, busy: float) -> float:
    """Return the exposed seconds of sums and gathers of the weights of a rank.

    What travels for each micro-batch is beside all passes, what travels once a step beside those of one micro-batch.
    """
    parallel, places = config.parallel, group_places(config)
    number = config.train.gradient_accumulation_steps
    runs = local_runs(config, parameter_table(config), layout_of(config), Coords(pp=pp))
    seconds = dict.fromkeys(product((True, False), repeat=2), 0.0)
    for move in store_moves(config, runs, places):
        times = move.times * rates.collective_s(move.kind, move.num_bytes, *places[move.group])
        seconds[move.is_of_pass, move.kind == "all_gather"] += times
    of_passes, sums, gathers = seconds[True, False] + seconds[True, True], seconds[False, False], seconds[False, True]
    overlaps = parallel.overlap_grad_reduce
    exposed = max(of_passes - busy * overlaps, 0.0) + max(sums - busy * overlaps * 2 / 3 / number, 0.0)
    return exposed + max(gathers - busy / 3 / number, 0.0)
