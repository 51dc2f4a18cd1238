"""What a run reads, to train and to validate: datakit's options, and what the trainer adds to them."""

from dataclasses import dataclass, field
from typing import Literal

from datakit import BlendConfig, StreamConfig
from threefold.needs import GIVEN
from threefold.options import Fault, option

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
