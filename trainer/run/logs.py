"""The sinks of a run: what is opened of the configuration, and what is refused before anything starts."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from threefold.errors import StorageError, UserError, quoted
from threefold.masking import masked, masked_values
from threefold.packages import require
from trainer.checkpoint.progress import Progress
from trainer.config import Config
from trainer.config.log import LogConfig
from trainer.job.ranks import Ranks
from trainer.observe.feed import Feed
from trainer.observe.json_lines import JsonLines
from trainer.observe.metrics import Log
from trainer.observe.sinks.sink import Opening, dotted

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
MLFLOW_URI, MLFLOW_HERE = "MLFLOW_TRACKING_URI", "sqlite:///mlflow.db"


def with_run(progress: Progress, config: Config, attempt: str) -> Progress:
    """Return progress with what sinks know the run by: as it was, or if a sink begins to need it this start's name."""
    if progress.run or set(config.log.to) <= {"jsonl"}:
        return progress
    return replace(progress, run=attempt)


def open_log(config: Config, ranks: Ranks, progress: Progress, sinks: Sequence[str] = ()) -> Log:
    """Open the log of a rank; the sinks are the first one's. `sinks` are those that had the lines until here."""
    log, is_first = config.log, ranks.rank == 0
    feeds, file, own = list[Feed](), None, None
    if is_first:
        if log.metrics:
            file = JsonLines(log.metrics, start_step=progress.step, say=ranks.say)
        opening = Opening(progress.run, progress.step, dotted(masked_values(asdict(config))), sinks)
        feeds = [Feed(name, opening, how, ranks.say) for name, how in feeds_of(log).items()]
    if log.ranks == "all":
        own = JsonLines(rank_file(log.metrics, ranks.rank), start_step=progress.step, say=ranks.say)
    steps = config.train.train_steps
    return Log(file, feeds, train_steps=steps, interval=log.interval, active=is_first, own=own)


def feeds_of(log: LogConfig) -> dict[str, Mapping[str, str]]:
    """Return the sinks that have processes, each with what it is opened with."""
    uri = log.mlflow_uri or os.environ.get(MLFLOW_URI, "") or MLFLOW_HERE
    hows: dict[str, Mapping[str, str]] = {
        "tensorboard": {"folder": os.path.abspath(log.tensorboard_dir)},
        "wandb": {"project": log.project, "name": log.name},
        "mlflow": {"uri": uri, "project": log.project, "name": log.name},
    }
    named = {name: how for name, how in hows.items() if name in log.to}
    return named | ({"on-event": {"command": log.on_event}} if log.on_event else {})


def rank_file(metrics: str, rank: int) -> str:
    """Return the file of one rank beside that of the run: of m.jsonl and rank 3 it is m.rank-00003.jsonl."""
    path = Path(metrics)
    return str(path.with_name(f"{path.stem}.rank-{rank:05}{path.suffix}"))


def check_sinks(log: LogConfig) -> None:
    """Raise UserError for a sink whose package or folder is not there, and for a command that is not.

    No package is imported.
    """
    for name, package in PACKAGES.items():
        if name in log.to:
            require(package, f"log.to {name}")
    if "tensorboard" in log.to:
        try:
            Path(log.tensorboard_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(log.tensorboard_dir, error.strerror) from error
        if not os.access(log.tensorboard_dir, os.W_OK | os.X_OK):
            raise not_written(log.tensorboard_dir, "no permission")
    if not log.on_event:
        return
    try:
        words = shlex.split(log.on_event)
    except ValueError as error:
        raise UserError(f"log.on_event {masked(log.on_event)!r}: {error}", hint="--log.on-event ./notify.sh") from error
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else log.on_event
        is_file = os.path.isfile(name)
        why = "is not executable" if is_file else "is not a command that is found here"
        raise UserError(
            f"log.on_event: {name!r} {why}", hint=f"chmod +x {quoted(name)}" if is_file else "command -v sh"
        )


def not_written(folder: str, why: str | None) -> StorageError:
    """Return the error for a folder of TensorBoard that cannot be written to."""
    return StorageError(
        f"log.tensorboard_dir {folder} cannot be written: {why}", hint="--log.tensorboard-dir tensorboard"
    )
