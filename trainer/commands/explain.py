"""`trainer explain`: show which rank holds, sends and keeps what in a run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.cli import print_line
from threefold.console import log, print_table
from threefold.errors import EXIT_OK, UserError
from threefold.flags import Settings, settings
from threefold.options import argument, option
from trainer.commands.shared import ELSEWHERE, check_places, of_layout, write_json
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
    from threefold.page import write_page
    from trainer.config.ramp import planned_size
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
    for line in filter(None, (assumed, planned_size(config.train))):
        log(line)
    known = explained(config, source.name, options.rank)
    if options.json != "-":
        log(f"{source.name} as {layout_of(config)}, on {known['world_size']} rank{'s' * (known['world_size'] > 1)}")
        print_known(config, known)
    write_json(options.json, known)
    if options.html:
        write_page(page(known), options.html)
    return EXIT_OK


def print_known(config: Config, known: Mapping[str, Any]) -> None:
    """Print tables of what is known of a rank, and of what ranks transfer."""
    from trainer.pipeline.draw import draw
    from trainer.plan.explained import timeline_of

    titles = ("tensor", "whole", "here", "held by", "keeps", "updates")
    fields = ("tensor", "shape", "held", "holders", "keeps", "updates")
    print_rows(dict(zip(fields, titles, strict=True)), known["tensors"], counts=())
    print_rows({"group": "group", "size": "ranks", "ranks": "members"}, known["groups"], counts=("ranks",))
    for line in draw(timeline_of(config)).splitlines():
        print_line(line)
    print_line("")
    names = ("pp", "kind", "group", "reason", "calls", "bytes")
    print_rows(dict(zip(names, names, strict=True)), known["transfers"], counts=("pp", "calls", "bytes"))


def print_rows(titles: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *, counts: Collection[str]) -> None:
    """Print a table of some fields of rows, and an empty line; nothing without rows."""
    if rows:
        cells = [[cell_text(row[name]) for name in titles] for row in rows]
        print_table(list(titles.values()), cells, left=[title for title in titles.values() if title not in counts])
        print_line("")


def cell_text(value: object) -> str:
    """Return a cell of a table, of a long list its first numbers."""
    if isinstance(value, list):
        return ", ".join(map(str, value[:16])) + (", ..." if len(value) > 16 else "")
    return f"{value:,}" if isinstance(value, int) else str(value)
