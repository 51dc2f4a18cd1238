"""The layouts of a run on so many GPUs, the best first: each planned in time by rates, in memory as a dry run does.

Candidates come in the order of a bound that no transfer can better: arithmetic and the bubble of even stages. Those
whose weights alone do not fit are left out before, and the search ends where the bound is above what was found, or
after `MOST` candidates.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

from threefold.errors import UserError
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import longest_row, resolve
from trainer.model.flops import active_size, count_parameters, token_flops
from trainer.model.recompute import Recompute
from trainer.model.table import parameter_table
from trainer.plan.passes import is_made_again
from trainer.plan.rates import Rates
from trainer.plan.step_time import StepTime, step_time
from trainer.plan.volumes import VolumeTable
from trainer.run.memory import RankMemory, rank_memory
from trainer.run.memory_check import powers_of_two, with_values
from trainer.store.parameter import Parameter

MOST, KEPT, SHOWN = 128, 24, 9  # candidates that are looked at, those that fit, and how many are returned at least
CLOSE = 1.01  # times the fastest: transfers beside arithmetic cost a little, of which no figure is known
LONG = 16384  # tokens of a row from which on cp is tried
WIDE, DEEP = 8, 16  # tp and pp at most
USABLE = 0.95  # of a GPU's memory, which its data sheet counts
RECOMPUTES: tuple[dict[str, Any], ...] = tuple(  # what keeps the most first
    {"train.recompute": how, "train.recompute_modules": modules, "train.recompute_keep": keep}
    for how, modules, keep in (
        ("none", (), "nothing"),
        ("selective", (), "nothing"),
        ("selective", ("mlp",), "nothing"),
        ("full", (), "attention"),
        ("full", (), "nothing"),
    )
)
Objective = Literal["time", "memory"]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A layout with its settings, that may have a fault; `bound` are seconds that its step takes at least, `state`
    about the bytes of a rank's weights, gradients and states."""

    settings: Settings
    bound: float
    state: float


@dataclass(frozen=True)
class Planned:
    """A candidate with its resolved configuration, the time of its step and the memory of its largest rank."""

    candidate: Candidate
    config: Config
    time: StepTime
    memory: RankMemory
    capacity: float

    @cached_property
    def fits(self) -> bool:
        """Return whether a GPU has memory for it."""
        return self.memory.total <= self.capacity * USABLE


def best_plans(config: Config, num_gpus: int, rates: Rates, objective: Objective) -> list[Planned]:
    """Return plans, the best first, those that do not fit last; UserError if no layout exists."""
    possible = list(candidates_of(config, num_gpus, rates))
    candidates = [one for one in possible if one.state <= rates.capacity]
    candidates.sort(key=smallness if objective == "memory" else lambda one: (one.bound, one.state))
    volumes, fitting = VolumeTable(), list[Planned]()
    large = list[tuple[RankMemory, Candidate, Config]]()
    with_room = set[tuple[Any, ...]]()  # what fits without making more again
    for candidate in candidates:
        fastest = min((plan.time.total for plan in fitting), default=math.inf)
        is_over = objective == "time" and candidate.bound > fastest
        if is_over or len(fitting) >= KEPT or len(fitting) + len(large) >= MOST:
            break
        kind = tuple(value for name, value in candidate.settings.items() if "recompute" not in name)
        if objective == "time" and kind in with_room:
            continue
        resolved = without_fault(config, candidate, num_gpus)
        if resolved is None:
            continue
        memory = largest_memory(resolved)
        if memory.total <= rates.capacity * USABLE:
            with_room.add(kind)
            fitting.append(planned(candidate, resolved, rates, volumes))
        else:
            large.append((memory, candidate, resolved))
    if not fitting and not large:
        raise nothing_planned(config, num_gpus, rates, possible)
    fastest = min((plan.time.total for plan in fitting), default=0.0)
    fitting.sort(key=size_of if objective == "memory" else partial(time_of, fastest=fastest))
    large.sort(key=lambda one: one[0].total)
    rest = large[: max(SHOWN - len(fitting), 0)]
    return fitting + [planned(candidate, resolved, rates, volumes) for _, candidate, resolved in rest]


def time_of(plan: Planned, fastest: float) -> tuple[float, ...]:
    """Return by what plans are sorted: of those that are about as fast as the fastest the one that moves least."""
    is_close = plan.time.total <= fastest * CLOSE
    return not is_close, plan.config.parallel.zero_stage * is_close, plan.time.total, plan.memory.total


def size_of(plan: Planned) -> tuple[float, ...]:
    """Return by what plans are sorted if memory counts."""
    return plan.memory.total, plan.time.total


def fixed_plan(config: Config, num_gpus: int, rates: Rates) -> Planned:
    """Return the plan of a configuration as it is; UserError if it has faults on so many GPUs."""
    run = on_gpus(config)
    if faults := cross_faults(run, num_gpus):
        raise UserError(f"on {gpus_text(num_gpus)}: {'; '.join(text for _, text in faults)}")
    return planned(Candidate({}, 0.0, 0.0), resolve(run, num_gpus), rates, VolumeTable())


def on_gpus(config: Config) -> Config:
    """Return a run on GPUs that does not evaluate, since plans have no stores."""
    return replace(config, train=replace(config.train, device="cuda", eval_interval=0))


def gpus_text(number: int) -> str:
    """Return so many GPUs in words."""
    return "1 GPU" if number == 1 else f"{number} GPUs"


def nothing_planned(config: Config, num_gpus: int, rates: Rates, possible: list[Candidate]) -> UserError:
    """Return why no candidate is planned: the smallest does not fit, or each has a fault."""
    by_size = sorted(possible, key=lambda one: one.state)
    smallest = next((one for one in by_size if without_fault(config, one, num_gpus) is not None), None)
    if smallest is None:
        batch = config.train.global_batch_size
        text = (
            f"no layout of {gpus_text(num_gpus)} has a whole micro-batch on each rank of dp, of {batch} samples a step"
        )
        return UserError(text, hint=f"--global-batch-size {math.lcm(batch, num_gpus)}")
    size = f"{smallest.state / 1e9:.1f} GB"
    text = f"weights and their states take {size} a rank on {gpus_text(num_gpus)}, which is too much"
    more = num_gpus * 2 ** math.ceil(math.log2(smallest.state / rates.capacity) + 1)
    return UserError(f"{text} for {rates.name}", hint=f"--gpus {more}")


def without_fault(config: Config, candidate: Candidate, num_gpus: int) -> Config | None:
    """Return the resolved run of a candidate, None if it has a fault."""
    changed = with_values(config, candidate.settings | {"train.gradient_accumulation_steps": 0})
    changed = on_gpus(changed)
    return None if cross_faults(changed, num_gpus) else resolve(changed, num_gpus)


def planned(candidate: Candidate, config: Config, rates: Rates, volumes: VolumeTable) -> Planned:
    """Return the plan of a candidate."""
    return Planned(
        candidate, config, step_time(config, rates, volumes.of(config)), largest_memory(config), rates.capacity
    )


def largest_memory(config: Config) -> RankMemory:
    """Return that of the rank that needs the most."""
    return max((rank_memory(config, pp) for pp in {0, config.parallel.pp - 1}), key=lambda memory: memory.total)


def candidates_of(config: Config, num_gpus: int, rates: Rates) -> Iterator[Candidate]:
    """Yield those whose micro-batches come out even; what else is at fault is seen when they are planned."""
    table = parameter_table(config)
    flops = token_flops(config, table, longest_row(config)).causal
    tokens = config.train.global_batch_size * config.train.seq_length
    arithmetic = flops * tokens / num_gpus / rates.flops
    num_parameters = count_parameters(config, table).total
    repeated = {
        (again["train.recompute"], again["train.recompute_modules"]): 1 + repeated_flops(config, table, again) / flops
        for again in RECOMPUTES
    }
    for settings in settings_of(config, num_gpus, rates.node):
        number, rest = divmod(
            config.train.global_batch_size, settings["train.micro_batch_size"] * settings["parallel.dp"]
        )
        if not rest and number:
            work = arithmetic * repeated[settings["train.recompute"], settings["train.recompute_modules"]]
            bound = work * (1 + idle_share(settings, number))
            yield Candidate(settings, bound, state_bytes(settings, num_parameters))


def repeated_flops(config: Config, table: Mapping[str, Parameter], again: Settings) -> float:
    """Return the operations a token of products that are made again, attention aside."""
    kept = Recompute.of_layer(with_values(config, again).train, 0)
    names = [name for name in table if name.startswith("layers.") and is_made_again(name, kept)]
    return 2.0 * sum(active_size(config, name, math.prod(table[name].shape)) for name in names)


def settings_of(config: Config, num_gpus: int, node: int) -> Iterator[Settings]:
    """Yield settings of all layouts of so many GPUs, of which so many are in a node."""
    model, train = config.model, config.train
    lengths = [1] if longest_row(config) < LONG else powers_of_two(min(longest_row(config) // 8192, 16))
    experts = powers_of_two(min(model.num_experts, WIDE)) if model.num_experts else [1]
    micro_batches = [size for size in (1, 2, 4, 8) if train.global_batch_size % size == 0]
    axes = product(powers_of_two(min(WIDE, num_gpus)), powers_of_two(DEEP), lengths, experts)
    for tp, pp, cp, ep in axes:
        if num_gpus % (tp * pp * cp) or pp > model.num_layers:
            continue
        dp = num_gpus // (tp * pp * cp)
        schedules = [("1f1b", 1)]
        if pp > 1:
            schedules += [("zb-h1", 1), *([("1f1b", 2)] * (pp * 2 <= model.num_layers))]
        shard = node // (tp * cp)  # ranks of dp in a node
        zeros = [(1, 0)] if dp * cp == 1 else [(1, 0), (2, 0), (3, 0)]
        zeros += [(2, shard), (3, shard)] if 1 < shard < dp and dp % shard == 0 else []
        for (schedule, virtual), zero, again, micro in product(schedules, zeros, RECOMPUTES, micro_batches):
            yield {
                "parallel.tp": tp,
                "parallel.pp": pp,
                "parallel.cp": cp,
                "parallel.ep": ep,
                "parallel.dp": dp,
                "parallel.schedule": schedule,
                "parallel.virtual_stages": virtual,
                "parallel.zero_stage": zero[0],
                "parallel.dp_shard": zero[1],
                "train.micro_batch_size": micro,
                **again,
            }


def idle_share(settings: Settings, num_microbatches: int) -> float:
    """Return the bubble over the arithmetic if all stages are equal and each pass takes as long."""
    share = (settings["parallel.pp"] - 1) / (settings["parallel.virtual_stages"] * num_microbatches)
    return share / 3 if settings["parallel.schedule"] == "zb-h1" else share


def smallness(candidate: Candidate) -> tuple[float, ...]:
    """Return by what candidates of little memory come first: states, what is made again, the micro-batch."""
    settings = candidate.settings
    again = {name: value for name, value in settings.items() if "recompute" in name}
    kept = -RECOMPUTES.index(again)
    return round(candidate.state / 1e9), kept, settings["train.micro_batch_size"], candidate.bound


def state_bytes(settings: Settings, num_parameters: int) -> float:
    """Return about what weights, gradients and states of a rank take, its experts among them."""
    over, stage = settings["parallel.dp"] * settings["parallel.cp"], settings["parallel.zero_stage"]
    shard = (settings["parallel.dp_shard"] or settings["parallel.dp"]) * settings["parallel.cp"]
    share = 2 / (shard if stage == 3 else 1) + 4 / (shard if stage > 1 else 1) + 12 / over
    return num_parameters / math.prod(settings[f"parallel.{axis}"] for axis in ("tp", "pp", "ep")) * share
