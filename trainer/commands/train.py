"""`trainer train`: train, or resume, a run."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from threefold.cli import print_line
from threefold.console import log
from threefold.errors import UserError
from threefold.flags import Settings, settings
from threefold.options import argument, option
from trainer.commands.shared import before_ranks, is_first_rank, world_size
from trainer.config import Config
from trainer.config.foreign.translate import translated
from trainer.job.environment import collecting_nothing
from trainer.job.failure import recorded


def _size(text: str) -> int:
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    number, unit = text[:-3], text[-3:]
    if unit not in units or not re.fullmatch(r"\d+(\.\d+)?", number) or not float(number):
        raise ValueError(f"{text!r} is not a size like 79GiB")
    return int(float(number) * units[unit])


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer train`."""

    config: str = argument("CONFIG.toml", "configuration; every key is also a flag, below", "")
    from_megatron: str = option(
        "",
        "print the configuration that says the same as a command line of Megatron-LM, or as the script that holds it; "
        "start nothing",
        metavar="COMMAND",
    )
    dry_run: bool = option(
        False,
        "check configuration, layout and stores, print the size of the model and the memory of a rank, start nothing; "
        "without torchrun as if all processes of the layout were there",
    )
    device_memory: int = option(
        0,
        "with --dry-run: memory of a GPU, as 79GiB, for the plan of a rank to fit in; else that of the GPU here",
        metavar="SIZE",
        parse=_size,
    )
    flags: Settings = settings(Config, foreign=translated)


@recorded
def run(options: Options) -> int:
    """Train a run; the same command resumes from the newest committed step under --save. With several processes:
    trainer launch --nproc-per-node 4 train CONFIG.toml --tp 2 --pp 2 ...; torchrun takes -m trainer before train."""
    from trainer.config.walk import load_config

    if options.from_megatron:
        beside = [options.config] * bool(options.config) + [text.flag for text in options.flags.values()]
        ours = {"--dry-run": options.dry_run, "--device-memory": options.device_memory}
        return print_converted(options.from_megatron, beside + [flag for flag, value in ours.items() if value])
    if options.device_memory and not options.dry_run:
        raise UserError(
            "--device-memory is for a dry run: a run is compared with the GPUs that it has", hint="--dry-run"
        )
    num_ranks = None if options.dry_run and "WORLD_SIZE" not in os.environ else world_size()
    config = before_ranks(lambda: load_config(named(options.config), options.flags, world_size=num_ranks))
    if options.dry_run:
        from trainer.run.preview import print_plan

        return before_ranks(lambda: print_plan(config, options.device_memory)) if is_first_rank() else 0
    with collecting_nothing():
        from trainer.run.loop import train

    return train(config)


def named(config: str) -> str:
    """Return the path of the configuration; UserError if none was given."""
    if not config:
        raise UserError("CONFIG.toml or --from-megatron COMMAND is missing, or empty", hint="trainer train --help")
    return config


def print_converted(text: str, beside: Sequence[str]) -> int:
    """Print the TOML of a command line of Megatron-LM, and to stderr what cannot be said here.

    UserError for arguments beside it, which would say nothing.
    """
    from trainer.config.foreign.conversion import Conversion, source_of
    from trainer.config.walk import config_from

    if beside:
        hint = "trainer train --from-megatron COMMAND > mega.toml, then trainer train mega.toml with what is beside it"
        raise UserError(f"--from-megatron is used alone, not with {', '.join(beside)}", hint=hint)
    source, command = source_of(text)
    conversion = Conversion.of(command)
    config_from(conversion.tables, source=source, world_size=None)
    for line in conversion.lines(source):
        print_line(line)
    for title, texts in (
        ("what does not exist here, and was left out:", conversion.missing),
        ("what only the shell knows, and is to be filled in:", conversion.open),
    ):
        if texts:
            log("\n  ".join([title, *texts]))
    return 0
