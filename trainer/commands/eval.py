"""`trainer eval`: loss and perplexity of a checkpoint on its validation sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.errors import EXIT_OK
from threefold.options import option
from trainer.commands.shared import OfCheckpoint, before_ranks, is_first_rank, world_size
from trainer.job.failure import recorded

PLAIN = "data.valid"


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `trainer eval`."""

    by: Literal["store", "tag"] | None = option(
        None, "a loss of each store too, or of each tag that `datakit preprocess --tag` gave to documents"
    )
    set: tuple[str, ...] = option(
        (), "evaluate this set of [[data.valid_sets]] alone; may be repeated", metavar="NAME", repeats=True
    )
    json: bool = option(False, "print one JSON document")


@recorded
def run(options: Options) -> int:
    """Evaluate a checkpoint of any layout on the fixed samples of [data.valid] and of each [[data.valid_sets]]."""
    from trainer.run.evaluate import evaluate_checkpoint
    from trainer.run.inference import open_checkpoint

    checkpoint = before_ranks(
        lambda: open_checkpoint(options.checkpoint, options.config, options.flags, world_size=world_size())
    )
    result = evaluate_checkpoint(checkpoint, options.by, options.set)
    if options.json and is_first_rank():
        print_json(result)
    elif is_first_rank():
        print_result(result, options.by)
    return EXIT_OK


def print_result(result: dict[str, Any], by: str | None) -> None:
    """Print what was measured, a line each, and then a table of the sets and of the groups of each."""
    sets = result.get("sets", {})
    for name, value in result.items():
        if name not in ("sets", f"by_{by}"):
            print_line(f"{name}: {value}")
    rows = [row for name, measured in {PLAIN: result, **sets}.items() for row in rows_of(name, measured, by)]
    if rows:
        names = ["set"] * bool(sets) + ([by] if by else [])
        first = 0 if sets else 1
        print_table((*names, "loss", "perplexity", "tokens"), [row[first:] for row in rows], left=set(names))


def rows_of(name: str, measured: dict[str, Any], by: str | None) -> Iterator[list[str]]:
    """Yield the rows of a set's table: the whole set if it is not above, and each group."""
    if name != PLAIN:
        yield [name, *[""] * bool(by), *numbers(measured)]
    for group in measured.get(f"by_{by}", ()):
        yield [name, group[by], *numbers(group)]


def numbers(measured: dict[str, Any]) -> list[str]:
    """Return loss, perplexity and tokens as texts; a dash for what no token was measured on."""
    loss, perplexity = (measured[name] for name in ("loss", "perplexity"))
    texts = ["-", "-"] if loss is None else [f"{loss:.4f}", f"{perplexity:,.2f}"]
    return [*texts, f"{measured['num_tokens']:,}"]
