"""What follows from a configuration: sizes that were left open, the layout, the places to save to."""

from dataclasses import replace

from ckptkit import ParallelLayout, Retention, Tiers, parse_tiers
from datakit import BatchSizes
from trainer.config import Config, ModelConfig
from trainer.config.checkpoint import SAVE_INTERVAL_S


def resolve(config: Config, world_size: int) -> Config:
    """Return a fault-free configuration with what was left open filled in (vocab_size apart)."""
    model, parallel, train, save = config.model, config.parallel, config.train, config.checkpoint
    dp = parallel.dp or world_size // ranks_a_sample(config)
    left_open = 0.0 if save.save_interval else SAVE_INTERVAL_S
    interval_s = left_open if save.save_interval_s < 0 else save.save_interval_s
    return replace(
        config,
        model=resolved_model(model),
        parallel=replace(parallel, dp=dp, dp_shard=parallel.dp_shard % dp),  # that dp itself is all of it too
        checkpoint=replace(save, save_interval_s=interval_s if save.save else 0.0),
        train=replace(train, gradient_accumulation_steps=train.global_batch_size // (train.micro_batch_size * dp)),
    )


def resolved_model(model: ModelConfig) -> ModelConfig:
    """Return a model with the sizes that were left open (vocab_size apart)."""
    ffn_size = model.ffn_hidden_size or 4 * model.hidden_size
    return replace(
        model,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_size=model.head_size or model.hidden_size // model.num_heads,
        ffn_hidden_size=ffn_size,
        expert_ffn_hidden_size=(model.expert_ffn_hidden_size or ffn_size) if model.num_experts else 0,
    )


def ranks_a_sample(config: Config) -> int:
    """Return how many ranks work on one sample: the others are of dp."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def settled(config: Config, before: Config | None = None) -> Config:
    """Return a resolved configuration with what a run keeps from its first start, unless it is asked for by name.

    That is the end of the learning-rate schedule, and which samples validate. `before` is what was recorded last. A
    run from before data.valid.seed was recorded took train.seed, and from before orders_copies was one order.
    """
    decay_steps, valid = config.optim.decay_steps, config.data.valid
    if before is not None:
        decay_steps = decay_steps or before.optim.decay_steps
    if valid.orders_copies is None and valid.order == "permuted":
        valid = replace(valid, orders_copies=before is None or bool(before.data.valid.orders_copies))
    if valid.seed is None and valid.order == "permuted":
        recorded = None if before is None else before.data.valid.seed
        valid = replace(valid, seed=(before.train.seed if before else 0) if recorded is None else recorded)
    return replace(
        config,
        optim=replace(config.optim, decay_steps=decay_steps or config.train.train_steps),
        data=replace(config.data, valid=valid),
    )


def tiers_of(config: Config) -> Tiers | None:
    """Return where a run saves to, None for nowhere; UserError if it is not well written.

    The first tier keeps what checkpoint.keep_* say unless its own text says something else.
    """
    keep = config.checkpoint
    if not keep.save:
        return None
    tiers = parse_tiers(keep.save)
    rules = Retention(keep.keep_last, keep.keep_every, keep.keep_best, keep.keep_hourly, keep.keep_best_metric)
    return tiers if tiers.first.retention.has_rules else replace(tiers, first=replace(tiers.first, retention=rules))


def shared_urls(tiers: Tiers | None) -> list[str]:
    """Return the URLs of the tiers that all nodes share, fastest first."""
    return [tier.url for tier in (tiers.first, *tiers.slower) if not tier.of_node] if tiers else []


def schedule_of(config: Config) -> str:
    """Return the schedule that a run takes: on one stage a backward pass follows its forward pass.

    Nothing waits there, so another order would only keep more. A tied matrix gets contributions in either pass, whose
    sum is then the same for all schedules.
    """
    return config.parallel.schedule if config.parallel.pp > 1 else "1f1b"


def layers_by_hand(pipeline_layout: str) -> list[int]:
    """Return the layers of each stage that are written out in numbers; none for "even" and "cost".

    ValueError if it is neither of them.
    """
    return [] if pipeline_layout in ("even", "cost") else [int(number) for number in pipeline_layout.split(",")]


def batch_sizes(config: Config) -> BatchSizes:
    """Return how many samples steps have: of a batch that grows, what they have where the run is."""
    return config.train.sizes(config.data.start_sample)


def row_lengths(config: Config) -> list[int]:
    """Return how many tokens rows have: train.seq_length, then each length that a [[data.mixture]] begins."""
    return [config.train.seq_length, *(each.seq_length for each in config.data.mixture if each.seq_length)]


def longest_row(config: Config) -> int:
    """Return how many tokens the longest rows have that are planned: it bounds memory and work of a micro-batch."""
    return max(row_lengths(config))


def layer_windows(config: Config) -> tuple[int | None, ...]:
    """Return how many keys the queries of each layer see, their own among them; None for all before.

    Layers that `window_every` counts see all, and a window that no row is longer than cuts nothing.
    """
    model = config.model
    window = model.window if 0 < model.window < longest_row(config) else None
    numbers, every = range(1, model.num_layers + 1), model.window_every
    return tuple(None if every and number % every == 0 else window for number in numbers)


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer of the model has experts; with moe_every 2 layers 1, 3, ... may, counted from 0."""
    return model.num_experts > 0 and layer >= model.first_dense_layers and (layer + 1) % model.moe_every == 0


def cuts_tokens(config: Config) -> bool:
    """Return whether tokens are cut over tp between the cut linears: sequence parallel, of rows of any length."""
    parallel, train = config.parallel, config.train
    num_parts = parallel.tp * parallel.cp
    divides = all(train.micro_batch_size * length % num_parts == 0 for length in row_lengths(config))
    return parallel.tp > 1 and divides and parallel.sequence_parallel != "off"


def gathers_keys(config: Config) -> bool:
    """Return whether ranks along cp gather keys and values, in place of trading tokens for heads."""
    parallel, kv_heads = config.parallel, config.model.num_kv_heads or config.model.num_heads
    takes_ulysses = not kv_heads % (parallel.tp * parallel.cp)
    method = parallel.cp_method if parallel.cp_method != "auto" else "ulysses" if takes_ulysses else "allgather"
    return parallel.cp > 1 and method == "allgather"


def keeps_gathered(config: Config) -> bool:
    """Return whether parameters that the ranks of dp cut are kept from their first pass to the end of the step.

    With several stages other passes come between the two of a micro-batch, and gathers for each would take too long.
    """
    how = config.parallel.reshard_after_forward
    return config.parallel.pp > 1 if how == "auto" else how == "off"


def kv_replicas(config: Config) -> int:
    """Return how many tensor-parallel neighbours hold the same key-value heads: more than one if tp exceeds them."""
    return max(config.parallel.tp // config.model.num_kv_heads, 1)


def layout_of(config: Config) -> ParallelLayout:
    """Return the parallel layout of a resolved configuration."""
    parallel = config.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp, "ep": parallel.ep}
    return ParallelLayout(**sizes, virtual=parallel.virtual_stages, etp=1 if parallel.etp == "1" else None)
