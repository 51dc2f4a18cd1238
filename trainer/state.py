"""Where a run stands, and how it comes back: the newest committed step that every rank can restore.

`--save` that holds a committed step wins; `--load` seeds an empty run only. Damage that one rank finds makes all ranks
fall back to the same older step; a checkpoint of another model is refused, never skipped.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.address import split_address
from ckptkit.format.root import DAMAGED_ROOT_KEY, ROOT_KEY, Root, step_folder
from ckptkit.loading.exchange import Exchange
from ckptkit.loading.fallback import Candidate, first_sound
from ckptkit.runs.catalogue import committed_steps
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from trainer.config import CheckpointConfig, Config
from trainer.engine import Engine
from trainer.exchange import open_exchange
from trainer.optim import learning_rate
from trainer.ranks import Ranks
from trainer.restoring import restore_step


@dataclass(frozen=True, slots=True)
class Validation:
    """The validation loss after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after `step` steps: tokens read, and the data stream's cursor as JSON (None at its start).

    `validation` is the last one since the save before, so that a step is judged by a loss of its own.
    """

    step: int = 0
    tokens: int = 0
    cursor: Mapping[str, Any] | None = None
    validation: Validation | None = None

    def metadata(self, config: Config, loss: float, device: torch.device) -> dict[str, Any]:
        """What a checkpoint's root records beside the tensors."""
        validation = self.validation
        return {
            "cursor": self.cursor,
            "cursor_digest": hashlib.sha256(json.dumps(self.cursor, sort_keys=True).encode()).hexdigest()[:16],
            "tokens": self.tokens,
            "loss": loss,
            **({"val_loss": validation.loss, "val_step": validation.step} if validation else {}),
            "lr": learning_rate(config.optim, max(self.step - 1, 0)),
            "config": dataclasses.asdict(config),
            "environment": environment(device),
        }


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a start of a run begins with: where it stands, the loss of the last step, the URL it came from (if any)."""

    progress: Progress
    loss: float = float("nan")
    url: str = ""


def environment(device: torch.device) -> dict[str, Any]:
    """What, beside configuration and layout, must be equal for a resumed run to repeat the other bit for bit."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"device": name, "num_threads": torch.get_num_threads(), "torch": torch.__version__}


def resume(ranks: Ranks, engine: Engine, config: Config) -> Resumed:
    """Restore the newest step that all ranks can read; the start of a run where nothing was saved."""
    found = ranks.broadcast(ranks.together(lambda: candidates(config) if ranks.rank == 0 else []))
    if not found:
        return Resumed(Progress())
    with open_exchange(ranks, config) as exchange:
        url, root = restore_any(ranks, engine, found, config.checkpoint, exchange)
    resumed = ranks.together(lambda: read_metadata(root, url))
    changes = differences(root, config, ranks.device)
    ranks.say(f"resumed from step {root.step} of {url}")
    if changes:
        ranks.say(f"not bit for bit as it was: {', '.join(changes)}")
    return resumed


def candidates(config: Config) -> list[tuple[str, int]]:
    """(run URL, step) of what may be resumed, newest first; empty for a run that starts from nothing."""
    save, load = config.checkpoint.save, config.checkpoint.load
    run, step = split_address(save)
    if step is not None:
        raise UserError(f"--save {save} names one step, a run is saved to a folder of steps", hint=f"--save {run}")
    found = steps_of(save) if save else []
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
    ranks: Ranks, engine: Engine, found: list[Candidate], config: CheckpointConfig, exchange: Exchange | None
) -> tuple[str, Root]:
    """Restore the first of `found` that no rank finds damaged into every rank's engine; gives its URL and root.

    A damaged step of the run's own URL stops counting as committed once an older one is restored: its root is kept
    under another name, so that the run can save that step anew.
    """

    def attempt(candidate: Candidate) -> Root | None:
        url, step = candidate
        root: Root | None = None
        error: Exception | None = None
        try:
            root = restore_step(engine, open_storage(url), step, exchange)
        except (UserError, OSError) as caught:
            error = caught
        faults = ranks.faults(error)
        if faults and all(isinstance(fault, CheckFailed) for fault in faults.values()):
            raise CheckFailed(ranks.told(faults))
        ranks.agree(error)
        return root

    try:
        taken, root = first_sound(found, attempt, strict=config.strict, report=ranks.say)
    except CheckFailed as damage:
        ranks.agree(damage)
        raise
    assert root is not None, "restored on every rank"
    engine.after_restore()
    damaged = found[: found.index(taken)]
    ranks.together(lambda: set_aside(damaged, config.save) if ranks.rank == 0 else None)
    return taken[0], root


def set_aside(damaged: list[tuple[str, int]], own: str) -> None:
    """Keep the roots of damaged steps of a run under another name."""
    for url, step in damaged:
        if url == own:
            storage, folder = open_storage(url), step_folder(step)
            storage.copy(f"{folder}/{ROOT_KEY}", f"{folder}/{DAMAGED_ROOT_KEY}")
            storage.delete([f"{folder}/{ROOT_KEY}"])


def read_metadata(root: Root, url: str) -> Resumed:
    """What a root records of the run; UserError where it was not saved by this trainer."""
    try:
        metadata = root.metadata
        validation = None
        if metadata.get("val_loss") is not None:
            validation = Validation(int(metadata["val_step"]), float(metadata["val_loss"]))
        progress = Progress(root.step, int(metadata["tokens"]), dict(metadata["cursor"]), validation)
        return Resumed(progress, float(metadata["loss"]), url)
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
