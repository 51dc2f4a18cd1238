"""What a run reports when it starts: its model, how it is cut, what a step reads, and what will be kept."""

import math
from collections.abc import Iterator

import torch

from ckptkit import Retention, Tiers
from datakit import Blend
from threefold import __version__
from trainer.config import CheckpointConfig, Config, TrainConfig
from trainer.config.eight_bits import eight_bit_names, left_weights
from trainer.config.resolve import (
    batch_sizes,
    cuts_tokens,
    has_experts,
    layer_windows,
    layout_of,
    longest_row,
    row_lengths,
)
from trainer.engine import DTYPES
from trainer.model.flops import count_parameters
from trainer.model.stages import stage_ranges
from trainer.model.table import parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.ops.rounding import BLOCK, packed_bytes
from trainer.pipeline.graph import WARM_UP_STEPS
from trainer.run.environment import queues_text
from trainer.store.numa import cores_of, node_of, on_cores


def banner(config: Config, device: torch.device, blend: Blend, tiers: Tiers | None) -> list[tuple[str, str]]:
    """Return the facts of a run, a name and a text each."""
    model, parallel, train = config.model, config.parallel, config.train
    count = count_parameters(config, parameter_table(config))
    active = f" ({count.active:,} of a token)" if count.idle else ""
    heads = f"{model.num_heads} heads"
    if model.num_kv_heads != model.num_heads:
        heads += f" ({model.num_kv_heads} of keys and values)"
    stored = {store.place: store.num_tokens for store in blend.stores}  # one for each length of its rows
    num_ranks = layout_of(config).world_size
    pp = f"{parallel.pp} of {parallel.virtual_stages} stages" if parallel.virtual_stages > 1 else f"{parallel.pp}"
    if parallel.pipeline_layout != "even" and parallel.pp > 1:
        num_stages = parallel.pp * parallel.virtual_stages
        ranges = stage_ranges(config, parameter_table(config), num_stages)
        pp += f" ({' + '.join(str(len(layers)) for layers in ranges)} layers)"
    cp = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    tokens_cut = ", sequence parallel" if cuts_tokens(config) else ""
    if tokens_cut and parallel.tp_overlap_parts > 1:
        tokens_cut += f" overlapped in {parallel.tp_overlap_parts} parts"
    facts = [
        ("trainer", __version__),
        (
            "model",
            f"{count.total:,} parameters{active}: {model.num_layers} layers of {model.hidden_size}, {heads}, "
            f"{model.activation} of {model.ffn_hidden_size}, {model.position} positions, {model.vocab_size:,} tokens",
        ),
        *(("experts", text) for text in experts_text(config)),
        *(("windows", text) for text in windows_text(config)),
        (
            "layout",
            f"tp {parallel.tp}{cp} x pp {pp} x dp {parallel.dp} = {num_ranks} rank{'s' * (num_ranks > 1)}, "
            f"{zero_text(config)}{tokens_cut}",
        ),
        ("step", step_text(config)),
        *(("ramp", text) for text in ramp_text(config)),
        ("data", f"{sum(stored.values()):,} tokens in {', '.join(stored)}"),
        *(("fetched", line) for line in blend.notes),
        ("device", f"{device_name(device)}, {train.precision}"),
        *(("loss scale", text) for text in scale_text(train)),
        *(("fp8", text) for text in fp8_text(config)),
        *(("attention", text) for text in weights_text(config, device)),
        *(("gradients", text) for text in gradients_text(config)),
        *(("queues", text) for text in [queues_text(config, device)] if text),
        *(("graphs", text) for text in graphs_text(config, device)),
        *(("offload", text) for text in offload_text(config, device)),
    ]
    return facts + kept(tiers, config.checkpoint)


def step_text(config: Config) -> str:
    """Return what steps read, and all of them together where their rows keep one length."""
    train, sizes, later = config.train, batch_sizes(config), row_lengths(config)[1:]
    tokens = " to ".join(f"{size * train.seq_length:,}" for size in sorted({sizes.sizes[0], sizes.final}))
    text = f"{sizes} samples of {train.seq_length} = {tokens} tokens; {train.train_steps:,} steps"
    if later:
        return f"{text}, later with rows of {', '.join(map(str, later))}"
    return f"{text} = {sizes.samples_after(0, train.train_steps) * train.seq_length:,} tokens"


def ramp_text(config: Config) -> Iterator[str]:
    """Yield from which step on the batch has grown, if it grows: of a run that keeps its settings."""
    sizes, rank_samples = batch_sizes(config), config.train.micro_batch_size * config.parallel.dp
    if sizes.rampup:
        step = sizes.first_of_final + 1
        numbers = f"{sizes.sizes[0] // rank_samples} to {sizes.final // rank_samples} micro-batches of a rank"
        yield f"{numbers}, {sizes.final:,} samples from step {step:,} on, which take the most memory"


def zero_text(config: Config) -> str:
    """Return what the data-parallel ranks cut."""
    parallel = config.parallel
    text, shard = f"ZeRO stage {parallel.zero_stage}", parallel.dp_shard
    if parallel.zero_stage > 1 and parallel.dp * parallel.cp == 1:
        return f"{text} (cuts nothing: dp is 1)"
    if shard == parallel.cp == 1:
        return f"{text} (cuts what stage 1 does: dp_shard is 1)"
    return f"{text} in {parallel.dp // shard} groups of {shard} along dp" if shard else text


def scale_text(train: TrainConfig) -> Iterator[str]:
    """Yield how the loss is scaled, if it is, with a warning where that rounds."""
    if train.precision != "fp16":
        return
    if train.loss_scale is None:
        scales = [train.initial_loss_scale, train.min_loss_scale]
        halves = f"halved by {train.hysteresis} void steps down to {train.min_loss_scale:,.15g}"
        yield f"{scales[0]:,.15g} at first, {halves}, doubled after {train.loss_scale_window:,} that count"
    else:
        scales = [train.loss_scale]
        yield f"{train.loss_scale:,.15g}"
    for scale in scales:
        if math.frexp(scale)[0] != 0.5:
            yield f"warning: {scale:,.15g} is not a power of two, so that scaling rounds gradients"


def gradients_text(config: Config) -> Iterator[str]:
    """Yield as what gradients travel to be summed, if they are rounded for that."""
    wide = wide_dtype(DTYPES[config.train.precision]).itemsize
    name, width = config.parallel.grad_reduce, {"bf16": 2.0, "int8": packed_bytes(BLOCK, 1, wide) / BLOCK}
    if name in width and layout_of(config).world_size > 1:
        yield f"travel in {name}, {width[name]:.4g} bytes an element in place of {wide}, to be summed"


def fp8_text(config: Config) -> Iterator[str]:
    """Yield which products are in eight bits, and which weights of linears in blocks are left, if any are."""
    fp8 = config.fp8
    if fp8.recipe == "off":
        return
    names = eight_bit_names(config)
    gradients = (
        f"in {fp8.grad_format}, those of weights too" if fp8.wgrad == "fp8" else f"of inputs in {fp8.grad_format}"
    )
    yield f"{fp8.recipe}: {len(names)} weights in e4m3, gradients {gradients}"
    yield from (f"left as it is: {text}" for text in left_weights(config))


def graphs_text(config: Config, device: torch.device) -> Iterator[str]:
    """Yield what becomes of the passes, if they are to be recorded."""
    if config.train.cuda_graphs:
        yield (
            f"the passes of a step are one CUDA graph, which step {WARM_UP_STEPS + 1} of this start records"
            if device.type == "cuda"
            else "none: a CPU has no CUDA graphs"
        )


def offload_text(config: Config, device: torch.device) -> Iterator[str]:
    """Yield where masters and moments are, and inputs of layers, if they are to be in the host's memory."""
    if config.train.recompute_offload:
        yield (
            "inputs of layers are in the host's memory between their two passes"
            if device.type == "cuda"
            else "train.recompute_offload has no effect: a CPU has inputs of layers in the host's memory anyway"
        )
    if config.optim.offload:
        if device.type != "cuda":
            yield "no effect: a CPU has masters and moments in the host's memory anyway"
            return
        node = node_of(device)
        with on_cores(cores_of(node)) as is_near:
            place = f"NUMA node {node}, which is the GPU's" if is_near else "whatever NUMA node a rank runs on"
        yield (
            f"masters and moments are in the host's memory, on {place}, and come through "
            f"{config.optim.offload_window_mib} MiB of the GPU's beside the next forward"
        )


def experts_text(config: Config) -> Iterator[str]:
    """Yield which layers have experts, if any have."""
    model = config.model
    num_layers = sum(has_experts(model, layer) for layer in range(model.num_layers))
    if num_layers:
        shared = f" and {model.num_shared_experts} shared" if model.num_shared_experts else ""
        yield (
            f"{model.num_experts} of {model.expert_ffn_hidden_size} in {num_layers} layers, "
            f"{model.experts_per_token}{shared} for a token"
        )


def windows_text(config: Config) -> Iterator[str]:
    """Yield what a window cuts, if the model has one."""
    model, windows = config.model, layer_windows(config)
    num_cut = sum(window is not None for window in windows)
    if num_cut:
        full = f", {len(windows) - num_cut} of them all" if num_cut < len(windows) else ""
        yield f"queries of {num_cut} layers see {model.window:,} tokens{full}"
    elif model.window:
        longest = longest_row(config)
        yield f"a window of {model.window:,} cuts nothing of rows of {longest:,} tokens: all layers see all of them"


def weights_text(config: Config, device: torch.device) -> Iterator[str]:
    """Yield what it costs on a GPU to drop weights of attention, or to have ALiBi, if the run does."""
    p, slow = config.model.attention_dropout, "plain torch in place of a fused kernel, many times slower"
    if device.type != "cuda":
        return
    if p:
        yield (
            f"{p:g} of the weights are dropped by the backend reference: {slow}; a new run with "
            "--model.attention-dropout 0 takes the fastest"
        )
    elif config.model.position == "alibi":
        yield f"ALiBi by the backend flash-2 if flash-attn is installed, else by reference: {slow}"


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or how many threads of the CPU a rank uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"CPU, {num_threads} thread{'s' * (num_threads > 1)} a rank"


def kept(tiers: Tiers | None, save: CheckpointConfig) -> list[tuple[str, str]]:
    """Return where a run saves, how often, and which steps stay: a fact for each tier."""
    if tiers is None:
        return [("save", "nowhere: nothing of this run will be kept (--save URL keeps it)")]
    intervals = [every(save.save_interval)] if save.save_interval else []
    intervals += [f"every {save.save_interval_s:g} s"] if save.save_interval_s else []
    facts = [("save", f"{tiers.first.url} {' and '.join([*intervals, 'at the end'])}; {rules(tiers.first.retention)}")]
    return facts + [("copy", f"{tier.url} {every(tier.every)}; {rules(tier.retention)}") for tier in tiers.slower]


def every(num_steps: int) -> str:
    """Return how often, in steps; 0 is whenever the run saves."""
    return f"every {num_steps} steps" if num_steps > 1 else "every step" if num_steps else "every save"


def rules(retention: Retention) -> str:
    """Return which steps stay in a place."""
    if not retention.has_rules:
        return "all steps stay"
    stays = [
        (retention.keep_last, f"the newest {retention.keep_last}"),
        (retention.keep_every, f"one every {retention.keep_every} steps"),
        (retention.keep_best, f"the best {retention.keep_best} by {retention.metric}"),
        (retention.keep_hourly, f"one of each of the last {retention.keep_hourly} hours"),
    ]
    return f"{', '.join(text for number, text in stays if number)} stay"
