"""Where a run stands, and how it comes back: the newest committed step that every rank can restore.

`--save` that holds a committed step wins, of several tiers the one with the newest, of equal ones the fastest; `--load`
seeds an empty run only. Damage that one rank finds makes all ranks fall back to the same step of a slower tier, or to
the same older one; a checkpoint of another model is refused, never skipped.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckptkit.address import split_address
from ckptkit.format.root import Root, step_folder
from ckptkit.runs.catalogue import committed_steps
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from trainer.config import Config
from trainer.config_check import tiers_of
from trainer.engine import Engine
from trainer.own_steps import OwnSteps, set_aside
from trainer.ranks import Ranks
from trainer.restoring import restore_step


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after `step` steps: tokens read, and the data stream's cursor as JSON (None at its start)."""

    step: int = 0
    tokens: int = 0
    cursor: Mapping[str, Any] | None = None

    def metadata(self, config: Config, loss: float, device: torch.device) -> dict[str, Any]:
        """What a checkpoint's root records beside the tensors."""
        return {
            "cursor": self.cursor,
            "tokens": self.tokens,
            "loss": loss,
            "config": dataclasses.asdict(config),
            "environment": environment(device),
        }


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a start of a run begins with: where it stands, the loss of the last step, the URL it came from (if any), and
    whether that is where the run saves to first."""

    progress: Progress
    loss: float = float("nan")
    url: str = ""
    is_own: bool = False


def environment(device: torch.device) -> dict[str, Any]:
    """What, beside configuration and layout, must be equal for a resumed run to repeat the other bit for bit."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"device": name, "num_threads": torch.get_num_threads(), "torch": torch.__version__}


def resume(ranks: Ranks, engine: Engine, config: Config) -> Resumed:
    """Restore the newest step that all ranks can read; the start of a run where nothing was saved."""
    tiers = ranks.together(lambda: tiers_of(config))
    own = OwnSteps(ranks, config, tiers)
    found = ranks.broadcast(ranks.together(lambda: candidates(config, own.steps) if ranks.rank == 0 else []))
    if not found:
        own.set_aside_after(-1)
        return Resumed(Progress())
    url, root = restore_any(ranks, engine, found, tiers=tiers.urls if tiers else (), own=own)
    own.set_aside_after(root.step if url == own.url else root.step - 1)
    resumed = ranks.together(lambda: read_metadata(root, url, is_own=tiers is not None and url == tiers.first.url))
    changes = differences(root, config, ranks.device)
    ranks.say(f"resumed from step {root.step} of {url}")
    if changes:
        ranks.say(f"not bit for bit as it was: {', '.join(changes)}")
    return resumed


def candidates(config: Config, of_nodes: Iterable[int] = ()) -> list[tuple[str, int]]:
    """(run URL, step) of what may be resumed, newest first; empty for a run that starts from nothing.

    `of_nodes` are the steps of a first tier that is each node's own.
    """
    load, tiers = config.checkpoint.load, tiers_of(config)
    found: list[tuple[str, int]] = []
    for tier in (tiers.first, *tiers.slower) if tiers else ():
        run, step = split_address(tier.url)
        if step is not None:
            text = f"--save {tier.url} names one step, a run is saved to a folder of steps"
            raise UserError(text, hint=f"--save {run}")
        found += [(tier.url, step) for step in of_nodes] if tier.of_node else steps_of(tier.url)
    found.sort(key=lambda each: -each[1])  # of one step the faster tier stays before the slower
    if not found and load:
        found = steps_of(load)
        if not found:
            raise UserError(f"{load} holds no committed step to seed the run with", hint=f"ckptkit ls {load}")
    return found


def steps_of(url: str) -> list[tuple[str, int]]:
    """(run URL, step) of the committed steps of a run URL, newest first, or of the one that a step URL names."""
    run, wanted = split_address(url)
    steps = committed_steps(open_storage(run))
    return [(run, step) for step in reversed(steps) if wanted in (None, step)]


def restore_any(
    ranks: Ranks, engine: Engine, found: list[tuple[str, int]], *, tiers: Sequence[str], own: OwnSteps
) -> tuple[str, Root]:
    """Restore the first of `found` that no rank finds damaged into every rank's engine; gives its URL and root.

    A damaged step of the run's `tiers` stops counting as committed once another is restored: its root is kept under
    another name, so that the run can save that step anew.
    """
    damaged: list[tuple[str, int]] = []
    for number, (url, step) in enumerate(found):
        root: Root | None = None
        error: Exception | None = None
        try:
            root = own.restore(engine, step) if url == own.url else restore_step(engine, open_storage(url), step)
        except CheckFailed as damage:
            error = CheckFailed(damage.message, hint=f"ckptkit verify {url}/{step_folder(step)}")
        except (UserError, OSError) as caught:
            error = caught
        faults = ranks.faults(error)
        if not faults and root is not None:
            engine.after_restore()
            shared = [each for each in damaged if each[0] in tiers and each[0] != own.url]
            ranks.together(partial(set_aside, shared if ranks.rank == 0 else []))
            return url, root
        last = number + 1 == len(found)
        if last or not all(isinstance(fault, CheckFailed) for fault in faults.values()):
            ranks.agree(error)
        ranks.say(ranks.where(faults) + faults[min(faults)].message)
        other_url, other = found[number + 1]
        where = f" of {other_url}" if other_url != url else ""
        ranks.say(f"falling back from step {step} to step {other}{where}")
        damaged.append((url, step))
    raise AssertionError("the last candidate is restored or refused")


def read_metadata(root: Root, url: str, *, is_own: bool) -> Resumed:
    """What a root records of the run; UserError where it was not saved by this trainer."""
    try:
        metadata = root.metadata
        progress = Progress(root.step, int(metadata["tokens"]), dict(metadata["cursor"]))
        return Resumed(progress, float(metadata["loss"]), url, is_own)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"step {root.step} of {url} holds no state of a training run", hint="--load another") from None


def differences(root: Root, config: Config, device: torch.device) -> list[str]:
    """What changed since a step was saved that changes the order of sums: layout, precision, machine, threads."""
    saved = root.metadata.get("config", {})
    now = dataclasses.asdict(config)
    watched = [("parallel", name) for name in ("tp", "pp", "dp", "zero_stage", "bucket_mib")]
    watched += [("train", "precision"), ("train", "micro_batch_size"), ("train", "global_batch_size")]
    pairs = [(name, saved.get(table, {}).get(name), now[table][name]) for table, name in watched]
    before = root.metadata.get("environment", {})
    pairs += [(name, before.get(name), value) for name, value in environment(device).items()]
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
