"""What a run reads, to train and to validate: datakit's options, and what the trainer adds to them."""

from dataclasses import dataclass, field
from typing import Literal

from datakit import BlendConfig, StreamConfig
from threefold.needs import GIVEN
from threefold.options import Fault, option

LOSS = "val_loss"  # of [data.valid], in a checkpoint's metadata
MEGATRON, PERMUTED = {"order": "megatron"}, {"order": "permuted"}


@dataclass(frozen=True, slots=True)
class ValidConfig(BlendConfig):
    """`[data.valid]`: the validation set."""

    num_samples: int = option(64, "how many fixed samples an evaluation reads", minimum=1)
    order: Literal["permuted", "megatron"] = option(
        "permuted",
        "which samples these are: megatron reads data.stores, the validation part of data.split",
        needs={"data.order": "megatron"},
    )
    order_samples: int = option(
        0, "megatron: validation samples of the whole run; 0: num_samples", minimum=0, needs=MEGATRON
    )
    seed: int | None = option(
        None, "permuted: seed of which samples these are; left out: 0, or what a run that goes on began with",
        minimum=0, maximum=2**63 - 1, needs=PERMUTED,
    )  # fmt: skip
    orders_copies: bool | None = option(
        None,
        "permuted: copies of a store have an order each; left out: true, or what a run that goes on began with",
        needs=PERMUTED,
    )

    @property
    def copies_differ(self) -> bool:
        """Whether copies of a store have an order each."""
        return self.orders_copies is not False

    def faults(self, table: str) -> list[Fault]:
        """Return the faults between the fields of this table."""
        faults = BlendConfig.faults(self, table)
        if self.order == "megatron" and self.stores:
            text = f'{table}.stores have an order of their own, and {table}.order = "megatron" reads data.stores'
            faults.append(({f"{table}.stores", f"{table}.order"}, text))
        if 0 < self.order_samples < self.num_samples:
            text = f"{table}.order_samples {self.order_samples} is less than {table}.num_samples {self.num_samples}"
            faults.append(({f"{table}.order_samples", f"{table}.num_samples"}, text))
        return faults


@dataclass(frozen=True, slots=True)
class ValidSetConfig(BlendConfig):
    """One `[[data.valid_sets]]`: a further validation set, whose loss is `val_loss/NAME`."""

    name: str = option("", "what it is called: letters, digits, _ and -")
    num_samples: int = option(64, "how many fixed samples an evaluation reads of it", minimum=1)

    def __str__(self) -> str:
        return f"{self.name}: {self.num_samples} samples of {', '.join(self.stores)}"

    @property
    def loss_name(self) -> str:
        """The name of its loss, in metrics and in a checkpoint's metadata."""
        return f"{LOSS}/{self.name}"

    def reads_as(self, other: "ValidSetConfig") -> bool:
        """Return whether another one reads the same samples, if its stores are the same, wherever they are."""
        names = "num_samples", "weights", "packing", "shuffle", "block_tokens"
        alike = all(getattr(self, name) == getattr(other, name) for name in names)
        return alike and len(self.stores) == len(other.stores)


@dataclass(frozen=True, slots=True)
class DataConfig(StreamConfig):
    """`[data]`: what the run reads."""

    tokenizer: str = option(
        "",
        "tokenizer file of the stores, checked against them; used by generate, else the stores' own copy",
        keeps_bits=True,
    )
    any_tokenizer: bool = option(
        False, "take data.tokenizer though another made the stores", keeps_bits=True, needs={"tokenizer": GIVEN}
    )
    valid: ValidConfig = field(default_factory=ValidConfig)
    valid_sets: tuple[ValidSetConfig, ...] = option(
        (), "further validation sets, each with a name and a loss of its own: [[data.valid_sets]]", keeps_bits=True
    )

    @property
    def validates(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.has_plain_valid or bool(self.valid_sets)

    @property
    def has_plain_valid(self) -> bool:
        """Whether `[data.valid]` names a validation set."""
        return bool(self.valid.stores) or self.valid.order == "megatron"

    @property
    def valid_stores(self) -> tuple[str, ...]:
        """The stores of all validation sets."""
        return (*self.valid.stores, *(store for valid_set in self.valid_sets for store in valid_set.stores))
