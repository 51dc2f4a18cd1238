"""What is other than it was when a step was saved, as far as it changes bits or the course of training.

Every setting is compared, except those whose option says `keeps_bits`. What the stream holds is compared by its record,
which refuses what would be another stream.
"""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from ckptkit import Root
from threefold.options import Fault, leaves, walk
from trainer.checkpoint.progress import environment
from trainer.config import Config
from trainer.config.resolve import cuts_tokens, ranks_a_sample, resolve, settled
from trainer.parallel import expert_parts, token_parts
from trainer.store.lr import learning_rate

PARTS = {token_parts.NAME: "tp_overlap_parts", expert_parts.NAME: "moe_overlap_parts"}  # each as ops record it


def recorded_config(root: Root) -> Config:
    """Return the configuration that a step records; keys that are younger than the step have their defaults."""
    ignored: list[Fault] = []  # keys that are gone by now
    config = walk(Config, root.metadata.get("config", {}), ignored)
    stream = root.metadata.get("stream")
    has_orders = isinstance(stream, dict) and stream.get("orders_copies")  # else copies of a store had one order
    if config.data.valid.orders_copies is None and (has_orders or "cursor" not in root.metadata):
        valid = dataclasses.replace(config.data.valid, orders_copies=True)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, valid=valid))
    return resolve(config, ranks_a_sample(config) * max(config.parallel.dp, 1))


def with_saved_vocabulary(config: Config, root: Root) -> Config:
    """Return a configuration, one without the size of its vocabulary with that of a step's embedding."""
    if config.model.vocab_size or "embed.weight" not in root.tensors:
        return config
    vocab_size = root.tensors["embed.weight"].shape[0]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def with_old_parts(ops: Mapping[str, str], before: Config) -> dict[str, str]:
    """Return the ops that a step records, with the number of parts of a run from before it was one of them."""
    parts = {token_parts.NAME: str(before.parallel.tp_overlap_parts or 1)} if cuts_tokens(before) else {}
    return parts | dict(ops)


def with_chosen(config: Config, ops: Mapping[str, str]) -> Config:
    """Return a configuration with the numbers of parts that a run chose, for those that are left to it."""
    open_ones = {op: name for op, name in PARTS.items() if not getattr(config.parallel, name)}
    chosen: dict[str, Any] = {name: int(ops[op]) for op, name in open_ones.items() if ops.get(op, "").isdecimal()}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **chosen))


def changes_of_run(root: Root, before: Config, now: Config, device: torch.device, ops: Mapping[str, str]) -> list[str]:
    """Return sentences on what differs from the run that saved a step and took the `ops`."""
    was = settled(before, before)  # also what the run of that step took without recording it
    settings = changed_settings(with_chosen(was, ops), with_chosen(now, ops))
    changes = [*settings, *changed_environment(root, device)]
    schedule, sets = changed_schedule(root, was, now), changed_sets(was, now)
    return [*not_bit_for_bit(changes), *schedule, *kept_samples(before, now), *sets]


def changes_of_model(root: Root, before: Config, now: Config) -> list[str]:
    """Return a sentence if settings of the model are others than an imported one was made with."""
    made = root.metadata.get("config", {}).get("model", {})
    old, new = dataclasses.asdict(before.model), dataclasses.asdict(now.model)
    changed = [name for name in made if name in old and old[name] != new[name]]
    return not_bit_for_bit([f"model.{name} {old[name]} -> {new[name]}" for name in changed])


def not_bit_for_bit(changes: list[str]) -> list[str]:
    """Return the sentence that lists changes, if there are any."""
    return [f"not bit for bit as it was: {', '.join(changes)}"] if changes else []


def changed_settings(before: Config, now: Config) -> list[str]:
    """Return each setting that differs and may change bits or the course of training, as `optim.lr 0.1 -> 0.2`."""
    watched = [leaf.name for leaf in leaves(Config) if not leaf.option.keeps_bits]
    pairs = [(name, value_of(before, name), value_of(now, name)) for name in watched]
    return [f"{name} {shown(old)} -> {shown(new)}" for name, old, new in pairs if old != new]


def changed_environment(root: Root, device: torch.device) -> list[str]:
    """Return what differs of the machine: device, threads, torch."""
    before = root.metadata.get("environment", {})
    pairs = [(name, before.get(name), value) for name, value in environment(device).items()]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def changed_schedule(root: Root, before: Config, now: Config) -> list[str]:
    """Return sentences: the next step's learning rate if it differs, and the end of a schedule that stays."""
    old, new = (learning_rate(config.optim, root.step) for config in (before, now))
    found = [f"learning rate of step {root.step + 1}: {old:.4g} -> {new:.4g}"] if old != new else []
    end, last = now.optim.decay_steps, now.train.train_steps
    if now.optim.cool_down_steps > 0:
        rates = f"{now.optim.cool_down_lr:.4g} to {min(now.optim.min_lr, now.optim.cool_down_lr):.4g}"
        return [*found, f"cools down since step {now.optim.cool_down_from}: from {rates} by its end, step {last}"]
    falls = now.optim.schedule != "constant"
    if falls and before.train.train_steps != last and before.optim.decay_steps == end != last:
        found.append(
            f"the run ends at step {last} now, and min_lr is still reached at step {end}: "
            f"--optim.decay-steps {last} moves that"
        )
    return found


def kept_samples(before: Config, now: Config) -> list[str]:
    """Return a sentence if a run from before data.valid.seed was recorded keeps the validation samples that it had."""
    seed = now.data.valid.seed
    is_kept = before.data.valid.seed is None and seed == before.train.seed
    if not is_kept or not seed or not now.data.valid.stores:
        return []
    return [
        f"validation reads the samples of seed {seed}, as the run began; --data.valid.seed 0 reads those of new runs"
    ]


def changed_sets(before: Config, now: Config) -> list[str]:
    """Return a sentence if validation sets are others, whose losses are then no longer those of before.

    Stores that were moved are the same.
    """
    old, new = ({valid_set.name: valid_set for valid_set in config.data.valid_sets} for config in (before, now))
    texts = [f"{name} joins" for name in new if name not in old]
    texts += [f"{name} is gone" for name in old if name not in new]
    texts += [f"{name} reads others" for name in old if name in new and not old[name].reads_as(new[name])]
    return [f"validation sets have changed: {', '.join(texts)}"] if texts else []


def value_of(config: Config, name: str) -> Any:
    """Return the value of a setting by its dotted name."""
    return attrgetter(name)(config)


def shown(value: Any) -> str:
    """Return a value for a reader: entries of a file as sentences, the value itself of a text, even if it is empty."""
    if isinstance(value, tuple) and all(map(dataclasses.is_dataclass, value)):
        return " and then ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)
