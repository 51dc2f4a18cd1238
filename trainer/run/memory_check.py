"""Whether a run fits into its devices: a rank's plan beside what a device has, and the settings that make it smaller.

Each setting is planned as the whole run is, so what it saves is what `--dry-run` prints less with it. A plan is as
right as `ACCURACY`: a run that is planned larger than the device by less than that may fit, and begins.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from threefold.errors import UserError
from threefold.options import leaves
from trainer.config import Config
from trainer.config.check import cross_faults
from trainer.config.resolve import layout_of, resolve
from trainer.mesh.mesh import ProcessMesh
from trainer.run.activations import host_bytes
from trainer.run.memory import RankMemory, rank_memory, size_text
from trainer.store.host_memory import refuse_without_room

ACCURACY = 0.05
MOST_PARTS, MOST_SETTINGS, MOST_TIMES = 3, 3, 64
Settings = dict[str, Any]  # values by the dotted names of their options


@dataclass(frozen=True)
class Plan:
    """A run as it is configured, and its rank that takes the most."""

    config: Config

    @cached_property
    def largest(self) -> tuple[int, RankMemory]:
        """Return the pipeline rank whose ranks take the most, and what these take."""
        memories = [rank_memory(self.config, pp) for pp in range(self.config.parallel.pp)]
        return max(enumerate(memories), key=lambda each: each[1].total)

    @property
    def total(self) -> int:
        """Return the bytes that it takes."""
        return self.largest[1].total

    def with_settings(self, settings: Settings) -> "Plan | None":
        """Return the plan of the same run with other settings; None if they cannot be, or need other ranks."""
        changed = with_values(self.config, settings)
        changed = with_values(changed, {"train.gradient_accumulation_steps": 0})
        world_size = layout_of(changed).world_size
        return None if cross_faults(changed, world_size) else Plan(resolve(changed, world_size))


@dataclass(frozen=True, slots=True)
class Way:
    """Settings that make a plan smaller, and the number of their kind: the lower, the less time they cost."""

    settings: Settings
    plan: Plan
    number: int = 0

    def __str__(self) -> str:
        return flags_of(self.settings)


def device_memory(device: torch.device) -> int:
    """Return the bytes that a GPU has; 0 for a CPU, whose memory is not only this process's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def check_memory(config: Config, device_bytes: int, say: Callable[[str], object]) -> None:
    """Compare a run with what each of its devices has, as `train.memory_check` asks for: UserError, or a line.

    Nothing is known of a device with 0 bytes.
    """
    plan, how = Plan(config), config.train.memory_check
    if how == "off" or not 0 < device_bytes < plan.total:
        return
    error = shortage(plan, device_bytes)
    if how == "refuse" and plan.total > device_bytes * (1 + ACCURACY):
        raise error
    say(f"warning: {error.message}")


def refuse_without_room_for_inputs(config: Config, mesh: ProcessMesh) -> None:
    """Raise UserError on all ranks if the host has too little memory for inputs of layers that are to be there."""
    if config.train.recompute_offload and mesh.device.type == "cuda":
        refuse_without_room(
            host_bytes(config, mesh.coords.pp),
            mesh.world,
            mesh.device,
            option="train.recompute_offload",
            hint="--micro-batch-size with less takes less; or leave --recompute-offload out",
        )


def shortage(plan: Plan, device_bytes: int) -> UserError:
    """Return what a run lacks, its largest parts, what helps, and the settings with which it fits as the hint."""
    pp, memory = plan.largest
    who = "a rank" if plan.config.parallel.pp == 1 else f"a rank of pipeline rank {pp}"
    text = f"{who} takes {size_text(memory.total)} by its plan, and its device has {size_text(device_bytes)}: "
    text += f"{size_text(max(memory.total - device_bytes, 0))} are missing; the largest: {largest_parts(memory)}"
    return UserError("\n  ".join([text, *saving_lines(plan, device_bytes)]), hint=hint_for(plan, device_bytes))


def largest_parts(memory: RankMemory) -> str:
    """Return the parts that take the most."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:MOST_PARTS]
    return ", ".join(f"{size_text(size)} {name}" for name, size in parts)


def saving_lines(plan: Plan, device_bytes: int) -> list[str]:
    """Return a line for each of the settings that save the most."""
    return [
        f"{way} saves {size_text(plan.total - way.plan.total)}" for way in best_ways(plan, device_bytes)[:MOST_SETTINGS]
    ]


def hint_for(plan: Plan, device_bytes: int) -> str:
    """Return settings with which the plan fits, of one kind if there are such, and on more ranks if there must be."""
    for times in powers_of_two(MOST_TIMES):
        more: Settings = {} if times == 1 else {"parallel.dp": plan.config.parallel.dp * times}
        larger = plan.with_settings(more)
        way = None if larger is None else fitting(larger, device_bytes)
        if larger is not None and way is not None:
            ranks = layout_of(way.plan.config).world_size
            return flags_of(with_count(more, plan, larger) | way.settings) + (f"; on {ranks} devices" if more else "")
    return "--train.memory-check warn; begins all the same"


def fitting(plan: Plan, device_bytes: int) -> Way | None:
    """Return the settings of one kind with which a plan fits, or of as few kinds as the largest savings first make."""
    way = Way({}, plan)
    while way.plan.total > device_bytes:
        ways = best_ways(way.plan, device_bytes)
        if not ways:
            return None
        enough = [each for each in ways if each.plan.total <= device_bytes]
        best = min(enough, key=lambda each: each.number) if enough else ways[0]
        way = Way(way.settings | best.settings, best.plan)
    return way


def best_ways(plan: Plan, device_bytes: int) -> list[Way]:
    """Return the settings that save anything, one of each kind, the most first.

    Of a kind that is the mildest with which the plan fits, or else the one that saves the most.
    """
    best: list[Way] = []
    for number, kind in enumerate(kinds(plan.config)):
        planned = [(settings, plan.with_settings(settings)) for settings in kind]
        ways = [
            Way(with_count(settings, plan, made), made, number)
            for settings, made in planned
            if made is not None and made.total < plan.total
        ]
        enough = [way for way in ways if way.plan.total <= device_bytes]
        if ways:
            best.append(enough[0] if enough else min(ways, key=lambda way: way.plan.total))
    return sorted(best, key=lambda way: way.plan.total)


def kinds(config: Config) -> Iterator[Sequence[Settings]]:
    """Yield the settings of each kind that a run may take, from the mildest on; tp stays inside a node of eight."""
    parallel, train, optim = config.parallel, config.train, config.optim
    yield [{"parallel.zero_stage": stage} for stage in range(parallel.zero_stage + 1, 4) if parallel.dp > 1]
    yield [{"parallel.dp_shard": 0}] * (parallel.dp_shard > 0)
    if parallel.zero_stage == 3:
        yield [{"parallel.reshard_after_forward": "on"}]
    made_again: list[Settings] = [
        {"train.recompute": "selective", "train.recompute_modules": modules}
        for modules in (("norms",), ("mlp",), ("mlp", "attention"))
    ]
    made_again += [{"train.recompute": "full", "train.recompute_keep": keep} for keep in ("attention", "nothing")]
    plain = {"train.recompute_modules": (), "train.recompute_keep": "nothing", "train.recompute_num_layers": 0}
    yield [needed(config, plain | settings) for settings in made_again]
    sizes = [size for size in range(train.micro_batch_size - 1, 0, -1) if train.micro_batch_size % size == 0]
    yield [{"train.micro_batch_size": size} for size in sizes]
    factors = [factor for factor in powers_of_two(8)[1:] if parallel.dp % factor == 0]
    inside = [factor for factor in factors if parallel.tp * factor <= 8]
    yield [{"parallel.cp": parallel.cp * factor, "parallel.dp": parallel.dp // factor} for factor in factors]
    yield [{"parallel.tp": parallel.tp * factor, "parallel.dp": parallel.dp // factor} for factor in inside]
    yield [{"parallel.pp": parallel.pp * factor, "parallel.dp": parallel.dp // factor} for factor in factors]
    yield [{"train.max_logits_gib": gib} for gib in (1.0, 0.25) if not 0 < train.max_logits_gib <= gib]
    yield [{"optim.master": "split"}] * (optim.master == "wide" and train.precision == "bf16")
    yield [{"optim.moments": "bf16"}] * (optim.moments == "wide")
    yield [{"parallel.grad_reduce": "wide"}] * (parallel.grad_reduce != "wide")
    yield [{"parallel.schedule": "1f1b"}] * (parallel.pp > 1 and parallel.schedule != "1f1b")


def with_count(settings: Settings, plan: Plan, changed: Plan) -> Settings:
    """Return settings that lead from a plan to another, with the number of micro-batches if that is another.

    A configuration may have the number, and it would contradict the settings.
    """
    before, count = (each.config.train.gradient_accumulation_steps for each in (plan, changed))
    return settings if count == before else settings | {"train.gradient_accumulation_steps": count}


def needed(config: Config, settings: Settings) -> Settings:
    """Return those settings that differ from what a run has."""
    return {name: value for name, value in settings.items() if value_at(config, name) != value}


def value_at(config: Config, name: str) -> Any:
    """Return the value of an option of a table."""
    table, _, field = name.partition(".")
    return getattr(getattr(config, table), field)


def with_values(config: Config, settings: Settings) -> Config:
    """Return a configuration with other values of options."""
    by_table: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        table, _, field = name.partition(".")
        by_table.setdefault(table, {})[field] = value
    changed: dict[str, Any] = {table: replace(getattr(config, table), **values) for table, values in by_table.items()}
    return replace(config, **changed)


def flags_of(settings: Settings) -> str:
    """Return settings as flags, by the shortest name of each."""
    known = {leaf.name: leaf for leaf in leaves(Config) if leaf.name in settings}
    words = []
    for name, value in settings.items():
        text = ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
        words.append(f"{min([known[name].flag, *known[name].option.flags], key=len)} {text}")
    return " ".join(words)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to `most`."""
    return [1 << place for place in range(most.bit_length()) if 1 << place <= most]
