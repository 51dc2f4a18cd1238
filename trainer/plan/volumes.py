"""What a layer, and the ends of a model, move in both passes of a micro-batch: read off traces of one and two layers.

Traces have one pipeline rank, and no more data-parallel ranks than experts need. What they move of tokens is that of
any other such run: it depends on tp, cp, ep and the micro-batch alone.
"""

from collections import Counter
from dataclasses import dataclass, replace

from trainer.config import Config
from trainer.config.resolve import cuts_tokens
from trainer.plan.trace import OF_STORE, Move, traced


@dataclass(frozen=True, slots=True)
class Volumes:
    """The moves of tokens of one layer and of embedding and head, forward and backward, of one micro-batch."""

    layer: Counter[Move]
    ends: Counter[Move]


class VolumeTable:
    """Volumes by what they depend on, each traced once; bytes are in proportion to the samples of a micro-batch."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[int, Volumes]] = {}

    def of(self, config: Config) -> Volumes:
        """Return those of a resolved run."""
        parallel, train = config.parallel, config.train
        if parallel.tp * parallel.cp * parallel.ep == 1:
            return Volumes(Counter(), Counter())
        again = train.recompute, train.recompute_modules, train.recompute_keep
        key = (parallel.tp, parallel.cp, parallel.ep, parallel.etp, cuts_tokens(config), *again)
        if key not in self._known:
            self._known[key] = train.micro_batch_size, traced_volumes(config)
        size, volumes = self._known[key]
        return Volumes(*(scaled(moves, train.micro_batch_size / size) for moves in (volumes.layer, volumes.ends)))


def scaled(moves: Counter[Move], factor: float) -> Counter[Move]:
    """Return moves of so many times the bytes, beside so many times the operations."""
    return Counter({move.scaled(factor): count for move, count in moves.items()})


def traced_volumes(config: Config) -> Volumes:
    """Return what traces of one and of two layers differ in, and what remains of the first."""
    one, two = (tokens_of(traced(of_layers(config, number), 0).moves) for number in (1, 2))
    return Volumes(two - one, one - (two - one))


def tokens_of(moves: Counter[Move]) -> Counter[Move]:
    """Return the moves whose bytes are of tokens."""
    return Counter({move: count for move, count in moves.items() if move.reason not in OF_STORE})


def of_layers(config: Config, number: int) -> Config:
    """Return the run with so many layers, all of one kind, on one pipeline rank with one micro-batch."""
    parallel, train = config.parallel, config.train
    lent = parallel.cp * (parallel.tp if parallel.etp == "1" else 1)
    dp = max(parallel.ep // lent, 1)
    model = replace(config.model, num_layers=number, first_dense_layers=0, moe_every=1)
    parallel = replace(
        parallel,
        dp=dp,
        pp=1,
        virtual_stages=1,
        pipeline_layout="even",
        zero_stage=1,
        dp_shard=0,
        zero_whole_kib=1024,
        reshard_after_forward="auto",
    )
    train = replace(
        train,
        global_batch_size=dp * train.micro_batch_size,
        rampup_batch_size=(),
        gradient_accumulation_steps=1,
        recompute_num_layers=0,
    )
    return replace(config, model=model, parallel=parallel, train=train)
