"""A run made small: its options stay, and its sizes shrink in ratio to the axes that cut them.

What divides or does not, is cut or whole, repeated or left over in the run is so in the small one. For example 64
query heads and 8 key-value heads over tp 8 become 16 and 8, and rows of 8,192 tokens that tp and cp cut still divide.
Every option that is not as it was is listed, with both values.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import gcd, prod
from typing import Any

from threefold.errors import UserError
from trainer.config import (
    Config,
    DataConfig,
    Fp8Config,
    ModelConfig,
    OpsConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from trainer.config.check import cross_faults
from trainer.config.resolve import gathers_keys, layers_by_hand, longest_row, resolve, resolved_model

HEAD_SIZE, VOCAB, ROW = 4, 23, 8  # of the small run: at least so many
STEPS, EPS, INIT_STD = 8, 1e-5, 0.3
ON_CPU = ("csrc", "torch", "reference", "sdpa-cpu")  # forms of ops that a CPU has
TABLES = ("model", "parallel", "data", "optim", "train", "ops", "fp8")  # whose changes are listed


@dataclass(frozen=True, slots=True)
class Change:
    """An option that the small run has otherwise."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.was)} -> {_shown(self.now)}"


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The small run, resolved and without a fault, and what became of the run's options."""

    config: Config
    changes: tuple[Change, ...]


def shrunk(config: Config, *, max_ranks: int = 64, unit: int = 1) -> Shrunk:
    """Return a resolved run made small, in float64 on a CPU, on at most `max_ranks` ranks.

    Its stores keep their names, which nothing opens. With a `unit` sides of a rank's weights, and its tokens of a
    micro-batch, are multiples of that, and products in eight bits stay. UserError if no small run has the same cuts.
    """
    model = resolved_model(config.model)
    config = replace(config, model=replace(model, vocab_size=model.vocab_size or VOCAB))
    parallel = _parallel(config, max_ranks)
    small = replace(config, parallel=parallel, model=_model(config, parallel, unit))
    train, data = _rows(config, small, unit)
    small = Config(
        model=_of_rows(config, small.model, longest_row(replace(small, train=train, data=data))),
        parallel=parallel,
        data=data,
        train=train,
        optim=_optim(config.optim, small),
        ops=forms_of_cpu(config),
        fp8=config.fp8 if unit > 1 else Fp8Config(),
    )
    num_ranks = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    if faults := cross_faults(small, num_ranks):
        text = f"no small run has the cuts of this one: {faults[0][1]}"
        raise UserError(text, hint="trainer train CONFIG.toml --dry-run checks the run itself")
    small = resolve(small, num_ranks)
    return Shrunk(small, tuple(changes_of(config, small)))


def changes_of(config: Config, small: Config) -> Iterator[Change]:
    """Yield the options that a small run has otherwise."""
    before, after = asdict(config), asdict(small)
    for table in TABLES:
        yield from _differences(table, before[table], after[table])


def _differences(name: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, dict):
        for key, was in before.items():
            yield from _differences(f"{name}.{key}", was, after[key])
    elif before != after:
        yield Change(name, before, after)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else f"{len(value)} of them" if isinstance(value, tuple) else f"{value}"
    return text or '""'


def _parallel(config: Config, max_ranks: int) -> ParallelConfig:
    """Return the layout, with shorter axes if it has too many ranks: those of dp first, and none below 2."""
    parallel = config.parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("dp", "pp", "cp", "tp")}
    if prod(sizes.values()) == 1:
        sizes["dp"] = 2  # else there is nothing to compare
    while prod(sizes.values()) > max_ranks:
        axis = next((axis for axis, size in sizes.items() if size > 2), None)
        if axis is None:
            raise UserError(f"{max_ranks} ranks are too few for each axis of the layout", hint="--all")
        smallest = next(size for size in range(2, sizes[axis] + 1) if sizes[axis] % size == 0)
        sizes[axis] = max(sizes[axis] // smallest, 2)
    lent = sizes["dp"] * sizes["cp"] * (sizes["tp"] if parallel.etp == "1" else 1)
    ep = gcd(parallel.ep, lent)
    dp_shard = gcd(parallel.dp_shard, sizes["dp"])
    if parallel.dp_shard and dp_shard == sizes["dp"] > 1:
        dp_shard //= 2 if sizes["dp"] % 2 == 0 else dp_shard
    virtual, whole = min(parallel.virtual_stages, 2), parallel.zero_whole_kib
    by_hand = _layers_by_hand(parallel.pipeline_layout, sizes["pp"] * virtual)
    return replace(
        parallel,
        **sizes,
        ep=ep,
        dp_shard=dp_shard if parallel.dp_shard else 0,
        virtual_stages=virtual,
        pipeline_layout=",".join(map(str, by_hand)) if by_hand else parallel.pipeline_layout,
        bucket_mib=0,
        grad_reduce="wide",  # what travels rounded has a check of its own
        zero_whole_kib=min(whole, 1) if parallel.zero_stage > 1 else whole,
    )


def _layers_by_hand(pipeline_layout: str, num_stages: int) -> list[int]:
    """Return one layer for a stage of few layers and two for one of more; none if stages are not by hand."""
    sizes = layers_by_hand(pipeline_layout)
    kept = sizes[: (num_stages + 1) // 2] + sizes[len(sizes) - num_stages // 2 :]  # those at both ends
    return [1 + (size > min(sizes)) for size in kept]


def _model(config: Config, parallel: ParallelConfig, unit: int) -> ModelConfig:
    """Return the model but for its rows."""
    model, heads = config.model, _heads(config, parallel)
    ratio, even, head_size = model.hidden_size / (model.num_heads * model.head_size), max(unit, 2), max(unit, HEAD_SIZE)
    hidden = max(round(heads[0] * head_size * ratio / even) * even, head_size)
    of_experts: dict[str, Any] = {}
    if model.num_experts:
        each = min(model.num_experts // config.parallel.ep, 2 if parallel.ep > 1 else 4)
        number = parallel.ep * each
        of_experts = {
            "num_experts": number,
            "experts_per_token": min(model.experts_per_token, 2, number),
            "expert_ffn_hidden_size": even * parallel.tp,
            "num_shared_experts": min(model.num_shared_experts, 2),
            "first_dense_layers": min(model.first_dense_layers, 1),
            "moe_every": min(model.moe_every, 2),
        }
    small = replace(
        model,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        hidden_size=hidden,
        ffn_hidden_size=(unit if unit > 1 else 3) * parallel.tp,
        vocab_size=_vocabulary(config, parallel),
        round_vocab_to=min(model.round_vocab_to, 4),
        window_every=min(model.window_every, 2),
        init_std=INIT_STD,
        **of_experts,
    )
    return replace(small, num_layers=_num_layers(config, small, parallel))


def _num_layers(config: Config, small: ModelConfig, parallel: ParallelConfig) -> int:
    """Return how many layers there are: one a stage and the rest of the division, each kind of layer among them."""
    by_hand, num_stages = layers_by_hand(parallel.pipeline_layout), parallel.pp * parallel.virtual_stages
    if by_hand:
        return sum(by_hand)
    before = config.model.num_layers
    rest = before % (config.parallel.pp * config.parallel.virtual_stages) > 0
    kinds = max(small.first_dense_layers + small.moe_every if small.num_experts else 0, small.window_every, 2)
    return min(before, max(num_stages + rest, kinds if num_stages == 1 else 1))


def _heads(config: Config, parallel: ParallelConfig) -> tuple[int, int]:
    """Return the fewest query and key-value heads that the layout cuts and repeats as it does the run's."""

    def cuts(heads: int, kv_heads: int, sizes: ParallelConfig) -> tuple[bool, ...]:
        tp, both = sizes.tp, sizes.tp * sizes.cp
        return heads % both == 0, kv_heads % tp == 0, kv_heads % both == 0, kv_heads < tp, heads == kv_heads

    model, both = config.model, parallel.tp * parallel.cp
    wanted = cuts(model.num_heads, model.num_kv_heads, config.parallel)
    for kv_heads in range(1, 2 * both + 1):
        for heads in range(kv_heads, 4 * both + 1, kv_heads):
            is_cut = heads % parallel.tp == 0 and 0 in (kv_heads % parallel.tp, parallel.tp % kv_heads)
            if is_cut and cuts(heads, kv_heads, parallel) == wanted:
                return heads, kv_heads
    return both * (1 + (model.num_heads > model.num_kv_heads)), both


def _vocabulary(config: Config, parallel: ParallelConfig) -> int:
    """Return a vocabulary whose rows tp divides, or not, as the run's."""
    size = -(-VOCAB // parallel.tp) * parallel.tp
    return size + (config.model.vocab_size % config.parallel.tp > 0 and parallel.tp > 1)


def _rows(config: Config, small: Config, unit: int) -> tuple[TrainConfig, DataConfig]:
    """Return the batch and the stream: rows in ratio, which are cut, and cut evenly, as the run's."""
    train, before, after = config.train, config.parallel, small.parallel
    micro = min(train.micro_batch_size, 2)

    def cuts(length: int, micro: int, sizes: ParallelConfig) -> tuple[bool, ...]:
        tokens = micro * length
        return length % (2 * sizes.cp) == 0, tokens % sizes.tp == 0, tokens % (sizes.tp * sizes.cp) == 0

    def rows(length: int, at_least: int) -> int:
        parts = after.cp * (2 if gathers_keys(small) else 1) * unit
        wanted = cuts(length, train.micro_batch_size, before)
        first = -(-at_least // parts) * parts
        lengths = range(first, first + 4 * parts * max(after.tp, 2), parts)
        return next((row for row in lengths if cuts(row, micro, after) == wanted), first)

    seq_length = rows(train.seq_length, max(ROW, after.cp * after.tp // micro))
    scale = seq_length / train.seq_length
    number, pp = train.global_batch_size // (train.micro_batch_size * before.dp), after.pp
    few, unit_samples = min(number, 2 * pp if pp > 1 else 3), micro * after.dp
    small_train = replace(
        train,
        seq_length=seq_length,
        micro_batch_size=micro,
        global_batch_size=few * unit_samples,
        # of two steps of one micro-batch a rank, and then one step or more of each other number
        rampup_batch_size=(unit_samples, unit_samples, 2 * (few - 1) * unit_samples) if train.rampup_batch_size else (),
        gradient_accumulation_steps=0,
        train_steps=STEPS,
        precision="fp64",
        device="cpu",
        cuda_graphs=False,
        loss_scale=None,
        eval_interval=0,
        max_logits_gib=_logits_limit(config),
        recompute_num_layers=min(train.recompute_num_layers, 1),
        **without_loss_scale(),
    )
    return small_train, _data(config.data, lambda length: rows(length, max(round(length * scale), 2)), seq_length)


def without_loss_scale() -> dict[str, Any]:
    """Return the options of a loss scale as they are without one."""
    plain, names = TrainConfig(), ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    return {name: getattr(plain, name) for name in names}


def _logits_limit(config: Config) -> float:
    """Return a limit that cuts logits into parts where the run's does."""
    train = config.train
    rows = -(-config.model.vocab_size // config.parallel.tp)
    size = train.micro_batch_size * longest_row(config) * rows * (4 if train.precision in ("fp32", "fp64") else 2)
    return 1e-7 if 0 < train.max_logits_gib * 2**30 < size else train.max_logits_gib


def _data(data: DataConfig, rows: Callable[[int], int], seq_length: int) -> DataConfig:
    """Return the stream: each mixture begins a step after the one before, masks and skips some of what it reads."""
    mixture = tuple(
        replace(
            each,
            from_step=2 + number,
            from_sample=None,
            skip=((0, 1),) if each.skip else (),
            seq_length=each.seq_length and rows(each.seq_length),
        )
        for number, each in enumerate(data.mixture)
    )
    return replace(
        data,
        mixture=mixture,
        indices=(),
        max_epochs=0,
        train_samples=0,
        start_sample=0,
        block_tokens=4 * seq_length if data.shuffle == "blocks" else data.block_tokens,
        valid=DataConfig().valid,
        valid_sets=(),
        tokenizer="",
        any_tokenizer=False,
    )


def _of_rows(config: Config, model: ModelConfig, longest: int) -> ModelConfig:
    """Return the model with what is counted in tokens of a row."""
    scale = longest / longest_row(config)
    window = max(round(model.window * scale), 1) if model.window else 0
    return replace(
        model,
        window=window,
        num_positions=longest if model.num_positions else 0,
        attention_window=longest if model.attention_window else 0,
        rope_original_length=max(round(model.rope_original_length * scale), 1)
        if model.rope_scaling == "llama3"
        else model.rope_original_length,
    )


def _optim(optim: OptimConfig, small: Config) -> OptimConfig:
    """Return the optimizer with few steps of its schedule; AdamW with a larger eps, as gradients of 0 are rounding."""
    plain = OptimConfig()
    return replace(
        optim,
        warmup_steps=min(optim.warmup_steps, 1),
        wsd_decay_steps=min(optim.wsd_decay_steps, 2),
        decay_steps=0,
        cool_down_steps=plain.cool_down_steps,
        cool_down_from=0,
        cool_down_lr=0.0,
        eps=max(optim.eps, EPS) if optim.name in ("adamw", "muon") else optim.eps,
        moments="wide",
        master="wide",
    )


def forms_of_cpu(config: Config) -> OpsConfig:
    """Return the forms of ops that a CPU has; the others are replaced by those of the project."""
    plain = OpsConfig()
    return replace(plain, **{name: form for name, form in asdict(config.ops).items() if form in ON_CPU})
