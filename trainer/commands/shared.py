"""What the verbs of the `trainer` command have in common: the processes of a job, and options on a checkpoint."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from threefold.errors import UserError
from threefold.flags import Settings, settings
from threefold.options import argument
from trainer.config import Config
from trainer.config.foreign.translate import translated
from trainer.job.failure import let_first_speak
from trainer.job.starters import adopt_start

T = TypeVar("T")
ELSEWHERE = (
    "Every key of the configuration is a flag too, such as --data.tokenizer FILE: trainer train --help lists them."
)


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint:
    """Options of a verb that reads a checkpoint."""

    checkpoint: str = argument("CKPT", "run URL (its newest committed step) or step URL, or hf:FOLDER")
    config: str | None = argument("CONFIG.toml", "default: the run's own, from the checkpoint", None)
    flags: Settings = settings(Config, hidden=ELSEWHERE, foreign=translated)


def world_size() -> int:
    """Return the number of processes that torchrun, srun or mpirun started; 1 without them."""
    adopt_start(os.environ)
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def before_ranks(action: Callable[[], T]) -> T:
    """Run what every rank does before ranks can talk; an error that all meet is reported once a node."""
    try:
        return action()
    except UserError:
        let_first_speak()
        raise
