"""The layouts of a run on so many GPUs, the best first: each planned in time by rates, in memory as a dry run does.

Each candidate has a bound that no transfer can better: arithmetic and the bubble of even stages. Those whose weights
alone do not fit are left out before. Of each layout one that fits is planned, then more of the layouts that were fast:
those whose bound is below what was found, and that make no more again than they must.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

from threefold.errors import UserError
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import batch_sizes, longest_row, resolve
from trainer.engine import DTYPES
from trainer.model.flops import active_size, count_parameters, token_flops
from trainer.model.recompute import Recompute
from trainer.model.table import parameter_table
from trainer.plan.axis_volumes import AxisVolume, axis_volumes
from trainer.plan.passes import is_made_again
from trainer.plan.rates import Rates
from trainer.plan.step_time import StepTime, step_time
from trainer.plan.volumes import VolumeTable
from trainer.run.memory import RankMemory, rank_memory
from trainer.run.memory_check import powers_of_two, with_values
from trainer.store.parameter import Parameter

EACH, SHOWN = 12, 9  # candidates of a layout behind its first one, and how many are returned at least
NEAR = 1.25  # times the fastest: layouts whose first plan takes longer are left at that
MOST, KEPT = 128, 24  # candidates that are looked at for the smallest, and those of them that fit
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
    axes: list[AxisVolume]

    @cached_property
    def fits(self) -> bool:
        """Return whether a GPU has memory for it."""
        return self.memory.total <= self.capacity * USABLE


class Search:
    """Candidates that were looked at: plans of those that fit, and the memory of those that do not."""

    def __init__(self, config: Config, num_gpus: int, rates: Rates, volumes: VolumeTable) -> None:
        self.config, self.num_gpus, self.rates, self.volumes = config, num_gpus, rates, volumes
        self.fitting, self.fastest = list[Planned](), math.inf
        self.large = list[tuple[RankMemory, Candidate, Config]]()
        self._with_room = set[tuple[Any, ...]]()  # what fits without making more again

    @property
    def num_seen(self) -> int:
        """Return how many were resolved."""
        return len(self.fitting) + len(self.large)

    def add(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits, and plan it then."""
        if any(is_larger(candidate, known) for _, known, _ in self.large):
            return False
        resolved = without_fault(self.config, candidate, self.num_gpus)
        if resolved is None:
            return False
        memory = largest_memory(resolved)
        if memory.total > self.rates.capacity * USABLE:
            self.large.append((memory, candidate, resolved))
            return False
        self._with_room.add(beside_recompute(candidate))
        self.fitting.append(planned(candidate, resolved, memory, self.rates, self.volumes))
        self.fastest = min(self.fastest, self.fitting[-1].time.total)
        return True

    def may_win(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be the fastest by its bound, and by what fits with less made again."""
        return candidate.bound <= self.fastest and beside_recompute(candidate) not in self._with_room

    def by_layout(self, candidates: list[Candidate]) -> None:
        """Look for the fastest: first one of each layout that fits, then others, those of fast layouts first."""
        groups: dict[tuple[Any, ...], list[Candidate]] = defaultdict(list)
        for candidate in sorted(
            candidates, key=lambda one: (one.bound, traffic(one), -one.settings["train.micro_batch_size"])
        ):
            groups[layout_settings(candidate)].append(candidate)
        firsts = list[tuple[float, list[Candidate]]]()
        for group in groups.values():
            number = next((place for place, one in enumerate(group) if self.may_win(one) and self.add(one)), None)
            if number is not None:
                firsts.append((self.fitting[-1].time.total, group[number + 1 :]))
        for seconds, group in sorted(firsts, key=lambda first: first[0]):
            most = self.num_seen + EACH * (seconds <= NEAR * self.fastest)
            for candidate in group:
                if self.num_seen < most and self.may_win(candidate):
                    self.add(candidate)

    def by_size(self, candidates: list[Candidate]) -> None:
        """Look for the smallest."""
        for candidate in sorted(candidates, key=smallness):
            if len(self.fitting) < KEPT and self.num_seen < MOST:
                self.add(candidate)


def best_plans(
    config: Config, num_gpus: int, rates: Rates, objective: Objective, volumes: VolumeTable | None = None
) -> list[Planned]:
    """Return plans, the best first, those that do not fit last; UserError if no layout exists."""
    possible = list(candidates_of(config, num_gpus, rates))
    candidates = [one for one in possible if one.state <= rates.capacity]
    search = Search(config, num_gpus, rates, volumes or VolumeTable())
    (search.by_size if objective == "memory" else search.by_layout)(candidates)
    fitting, large = search.fitting, sorted(search.large, key=lambda one: one[0].total)
    if not fitting and not large:
        raise nothing_planned(config, num_gpus, rates, possible)
    fitting.sort(key=size_of if objective == "memory" else partial(time_of, fastest=search.fastest))
    rest = large[: max(SHOWN - len(fitting), 0)]
    return fitting + [
        planned(candidate, resolved, memory, rates, search.volumes) for memory, candidate, resolved in rest
    ]


def layout_settings(candidate: Candidate) -> tuple[Any, ...]:
    """Return what of a candidate is its layout and schedule."""
    names = ("tp", "pp", "cp", "ep", "schedule", "virtual_stages")
    return tuple(candidate.settings[f"parallel.{name}"] for name in names)


def beside_recompute(candidate: Candidate) -> tuple[Any, ...]:
    """Return all settings of a candidate but what is made again."""
    return tuple(value for name, value in candidate.settings.items() if "recompute" not in name)


def is_larger(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate of the same layout has at least as much of everything as another."""
    sizes = [(one.settings["train.micro_batch_size"], kept_rank(one), one.state) for one in (candidate, other)]
    return layout_settings(candidate) == layout_settings(other) and all(map(operator.ge, *sizes))


def traffic(candidate: Candidate) -> float:
    """Return a number that is greater the more of a candidate's weights travels, and the farther."""
    stage, shard = candidate.settings["parallel.zero_stage"], candidate.settings["parallel.dp_shard"]
    return stage + (0.0 if shard or stage == 1 else 1.5)


def kept_rank(candidate: Candidate) -> int:
    """Return a number that is greater the more passes keep."""
    again = {name: value for name, value in candidate.settings.items() if "recompute" in name}
    return -RECOMPUTES.index(again)


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
    resolved = resolve(run, num_gpus)
    return planned(Candidate({}, 0.0, 0.0), resolved, largest_memory(resolved), rates, VolumeTable())


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
        batch, sizes = config.train.global_batch_size, batch_sizes(config)
        text = (
            f"no layout of {gpus_text(num_gpus)} has a whole micro-batch on each rank of dp, of {sizes} samples a step"
        )
        way = f"--global-batch-size {math.lcm(batch, num_gpus)}"
        if sizes.rampup:
            way = f"--global-batch-size {math.lcm(batch, 2 * num_gpus)} --rampup-batch-size {num_gpus} {num_gpus} "
            way += str(sizes.rampup[2])
        return UserError(text, hint=way)
    size = f"{smallest.state / 1e9:.1f} GB"
    text = f"weights and their states take {size} a rank on {gpus_text(num_gpus)}, which is too much"
    more = num_gpus * 2 ** math.ceil(math.log2(smallest.state / rates.capacity) + 1)
    return UserError(f"{text} for {rates.name}", hint=f"--gpus {more}")


def without_fault(config: Config, candidate: Candidate, num_gpus: int) -> Config | None:
    """Return the resolved run of a candidate, None if it has a fault."""
    changed = with_values(config, candidate.settings | {"train.gradient_accumulation_steps": 0})
    changed = on_gpus(changed)
    return None if cross_faults(changed, num_gpus) else resolve(changed, num_gpus)


def planned(candidate: Candidate, config: Config, memory: RankMemory, rates: Rates, volumes: VolumeTable) -> Planned:
    """Return the plan of a candidate."""
    moves = volumes.of(config)
    axes = axis_volumes(config, rates, moves)
    return Planned(candidate, config, step_time(config, rates, moves), memory, rates.capacity, axes)


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
            bound = work * (1 + idle_share(settings, number)) + number * least_transfers_s(config, rates, settings)
            yield Candidate(settings, bound, state_bytes(settings, num_parameters))


def least_transfers_s(config: Config, rates: Rates, settings: Settings) -> float:
    """Return what tp moves for a micro-batch at least: of a dense layer's ten calls six are beside nothing."""
    tp, pp = settings["parallel.tp"], settings["parallel.pp"]
    if tp == 1:
        return 0.0
    tokens = settings["train.micro_batch_size"] * config.train.seq_length // settings["parallel.cp"]
    num_bytes = tokens * config.model.hidden_size * DTYPES[config.train.precision].itemsize
    calls = (3 if config.model.num_experts else 6) * (config.model.num_layers // pp)
    return calls * rates.collective_s("all_gather", num_bytes, tp, tp)


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
    return round(candidate.state / 1e9), kept_rank(candidate), settings["train.micro_batch_size"], candidate.bound


def state_bytes(settings: Settings, num_parameters: int) -> float:
    """Return about what weights, gradients and states of a rank take, its experts among them."""
    over, stage = settings["parallel.dp"] * settings["parallel.cp"], settings["parallel.zero_stage"]
    shard = (settings["parallel.dp_shard"] or settings["parallel.dp"]) * settings["parallel.cp"]
    share = 2 / (shard if stage == 3 else 1) + 4 / (shard if stage > 1 else 1) + 12 / over
    return num_parameters / math.prod(settings[f"parallel.{axis}"] for axis in ("tp", "pp", "ep")) * share
