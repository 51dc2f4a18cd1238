"""`trainer explain`: show which rank holds, sends and keeps what in a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from threefold.cli import print_line
from threefold.console import log, print_table
from threefold.errors import EXIT_OK, UserError
from threefold.flags import Settings, settings
from threefold.options import argument, option
from trainer.commands.shared import ELSEWHERE, check_places, of_layout, write_known
from trainer.config import Config
from trainer.config.foreign.translate import translated


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer explain`."""

    config: str = argument("CONFIG.toml|RUN", "configuration, or a run", "")
    from_megatron: str = option("", "explain what a command line of Megatron-LM says, or its script", metavar="COMMAND")
    layout: str = option("", "explain another layout than the configuration's", metavar="tp2-pp2-dp2")
    rank: int = option(0, "whose tensors and groups are listed", minimum=0)
    json: str = option("", "write all of it as JSON; - prints it", metavar="FILE")
    html: str = option("", "write it as a page; needs threefold[plot]", metavar="FILE")
    flags: Settings = settings(Config, hidden=ELSEWHERE, foreign=translated)


def run(options: Options) -> int:
    """Print the tensors of a rank with their cuts, its groups, the schedule, and what a step transfers in bytes, by
    kind, group and reason. The step's own code runs on tensors that have only shapes: no GPU, no store and no memory
    are needed. Bytes are those of the tensors that a rank hands to each call."""
    from trainer.config.resolve import layout_of
    from trainer.plan.explained import explained, page, with_known_vocabulary
    from trainer.verify.source import open_run_or_file

    if bool(options.config) == bool(options.from_megatron):
        raise UserError(
            "one of CONFIG.toml, RUN and --from-megatron COMMAND is explained", hint="trainer explain --help"
        )
    check_places(options.json, options.html)
    flags = {**options.flags, **of_layout(options.layout, options.flags)}
    source = open_run_or_file(options.config, flags, megatron=options.from_megatron)
    config, assumed = with_known_vocabulary(source.config)
    if assumed:
        log(assumed)
    known = explained(config, source.name, options.rank)
    if options.json != "-":
        log(f"{source.name} as {layout_of(config)}, on {known['world_size']} ranks")
        print_known(config, known)
    write_known(options.json, options.html, known, page)
    return EXIT_OK


def print_known(config: Config, known: Mapping[str, Any]) -> None:
    """Print tables of what is known of a rank, and of what ranks transfer."""
    from trainer.pipeline.draw import draw
    from trainer.plan.explained import timeline_of

    columns = ("tensor", "whole", "here", "held by", "keeps", "updates")
    rows = [
        (row["tensor"], shape_text(row["shape"]), row["held"], row["holders"], row["keeps"], row["updates"])
        for row in known["tensors"]
    ]
    print_table(columns, rows, left=columns)
    if known["groups"]:
        print_line("")
        rows = [(row["group"], str(row["size"]), members_text(row["ranks"])) for row in known["groups"]]
        print_table(("group", "ranks", "members"), rows, left=("group", "members"))
    print_line("")
    for line in draw(timeline_of(config)).splitlines():
        print_line(line)
    if known["transfers"]:
        print_line("")
        names = ("pp", "kind", "group", "reason", "calls", "bytes")
        rows = [tuple(cell_text(row[name]) for name in names) for row in known["transfers"]]
        print_table(names, rows, left=("kind", "group", "reason"))


def cell_text(value: object) -> str:
    """Return a cell of a table."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def shape_text(shape: list[int]) -> str:
    """Return a shape, as 128 x 64."""
    return " x ".join(map(str, shape))


def members_text(ranks: list[int]) -> str:
    """Return the first ranks of a group."""
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
