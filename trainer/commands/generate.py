"""`trainer generate`: continue a prompt with a checkpoint."""

from dataclasses import dataclass

from threefold.errors import EXIT_OK
from threefold.options import option
from trainer.commands.shared import OfCheckpoint
from trainer.job.failure import recorded


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `trainer generate`."""

    prompt: str = option(..., "text to continue", metavar="TEXT")
    tokens: int = option(64, "tokens to add", metavar="N")
    temperature: float = option(0.0, "0 always takes the likeliest, else --seed N seeds the choice", metavar="X")


@recorded
def run(options: Options) -> int:
    """Continue a prompt with a checkpoint of any layout, in one process."""
    from trainer.run.generate import generate_text
    from trainer.run.inference import open_checkpoint

    checkpoint = open_checkpoint(options.checkpoint, options.config, options.flags, world_size=1)
    print(generate_text(checkpoint, options.prompt, num_tokens=options.tokens, temperature=options.temperature))
    return EXIT_OK
