"""What the verbs of the `trainer` command have in common: the processes of a job, options on a checkpoint or a layout,
and what is written as JSON and as a page."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from threefold.cli import print_json
from threefold.errors import UserError
from threefold.flags import Settings, settings
from threefold.options import FlagText, argument
from trainer.config import Config
from trainer.config.foreign.translate import translated
from trainer.job.failure import let_first_speak
from trainer.job.starters import adopt_start

T = TypeVar("T")
AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "virtual": "virtual_stages"}
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


def of_layout(layout: str, flags: Settings) -> Settings:
    """Return the flags that mean the same as a layout: axes that it does not name are 1."""
    from ckptkit import ParallelLayout

    if not layout:
        return {}
    sizes = ParallelLayout.named_sizes(layout)
    if beside := [flag for name in AXES.values() if (flag := flags.get(f"parallel.{name}"))]:
        raise UserError(f"--layout {layout} names all axes, and {beside[0].flag} one of them", hint="--layout")
    etp = {"parallel.etp": str(sizes["etp"])} if "etp" in sizes else {}
    texts = {f"parallel.{key}": str(sizes.get(axis, 1)) for axis, key in AXES.items()} | etp
    return {key: FlagText(text, "--layout") for key, text in texts.items()}


def check_places(json_path: str, html_path: str) -> None:
    """Raise UserError if what is known cannot be where it is asked for."""
    from threefold.packages import require
    from threefold.page import check_page_path

    if html_path:
        require("jinja2", "a page")
    for path in (json_path, html_path):
        if path not in ("", "-"):
            check_page_path(path)


def write_json(place: str, known: Any) -> None:
    """Write what is known as JSON: to a file, to stdout for "-", nowhere without a place."""
    from threefold.page import write_page

    if place == "-":
        print_json(known)
    elif place:
        write_page(json.dumps(known, indent=1, default=str) + "\n", place)
