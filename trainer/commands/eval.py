"""`trainer eval`: loss and perplexity of a checkpoint on [data.valid]."""

from dataclasses import dataclass

from threefold.cli import print_json, print_line
from threefold.errors import EXIT_OK
from threefold.options import option
from trainer.commands.shared import OfCheckpoint, before_ranks, is_first_rank, world_size
from trainer.job.failure import recorded


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `trainer eval`."""

    json: bool = option(False, "print one JSON document")


@recorded
def run(options: Options) -> int:
    """Evaluate a checkpoint of any layout on the fixed samples of [data.valid]."""
    from trainer.run.evaluate import evaluate_checkpoint
    from trainer.run.inference import open_checkpoint

    checkpoint = before_ranks(
        lambda: open_checkpoint(options.checkpoint, options.config, options.flags, world_size=world_size())
    )
    result = evaluate_checkpoint(checkpoint)
    if options.json and is_first_rank():
        print_json(result)
    elif is_first_rank():
        for name, value in result.items():
            print_line(f"{name}: {value}")
    return EXIT_OK
