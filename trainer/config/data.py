"""What a run reads, to train and to validate: datakit's options, and what the trainer adds to them."""

from dataclasses import dataclass, field

from datakit import BlendConfig, StreamConfig
from threefold.options import option


@dataclass(frozen=True, slots=True)
class ValidConfig(BlendConfig):
    """`[data.valid]`: the validation set."""

    num_samples: int = option(64, "how many fixed samples an evaluation reads", minimum=1)


@dataclass(frozen=True, slots=True)
class DataConfig(StreamConfig):
    """`[data]`: what the run reads."""

    tokenizer: str = option("", "tokenizer file that made the stores; checked against them, used by generate")
    valid: ValidConfig = field(default_factory=ValidConfig)
