"""What a run reads, to train and to validate."""

from dataclasses import dataclass, field

from threefold.options import option


@dataclass(frozen=True, slots=True)
class ValidConfig:
    """`[data.valid]`: the validation set."""

    stores: tuple[str, ...] = option((), "token stores of the validation set")
    weights: tuple[float, ...] = option((), "one weight a store; empty means equal", above=0)
    num_samples: int = option(64, "how many fixed samples an evaluation reads", minimum=1)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """`[data]`: what the run reads."""

    stores: tuple[str, ...] = option((), "token stores to train on")
    weights: tuple[float, ...] = option((), "one weight a store; empty means equal", above=0)
    tokenizer: str = option("", "tokenizer file that made the stores; checked against them, used by generate")
    mask_eod_loss: bool = option(False, "leave the loss at end-of-document tokens out")
    reset_positions: bool = option(False, "count positions from 0 after each end of document")
    max_epochs: int = option(0, "end the run, with a save, after this many epochs; 0 means no end", minimum=0)
    valid: ValidConfig = field(default_factory=ValidConfig)
