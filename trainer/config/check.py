"""Faults that several fields of a configuration make together."""

import math
from collections.abc import Iterator
from contextlib import suppress

from threefold.errors import UserError
from threefold.needs import unmet
from threefold.options import Fault
from trainer.config import Config, OptimConfig
from trainer.config.eight_bits import fp8_faults
from trainer.config.graphs import graph_faults
from trainer.config.ops import op_faults
from trainer.config.profile import profile_faults
from trainer.config.ramp import ramp_faults
from trainer.config.resolve import (
    cuts_tokens,
    gathers_keys,
    has_experts,
    layers_by_hand,
    longest_row,
    ranks_a_sample,
    row_lengths,
    tiers_of,
)
from trainer.config.validation import best_faults, eval_faults


def cross_faults(config: Config, world_size: int) -> list[Fault]:
    """Return every fault that several fields make together; empty for a run that can start on `world_size` ranks."""
    return [
        *model_faults(config),
        *expert_faults(config),
        *cut_faults(config),
        *context_faults(config),
        *stage_faults(config),
        *recompute_faults(config),
        *layout_faults(config, world_size),
        *expert_cut_faults(config, world_size),
        *shard_faults(config, world_size),
        *data_faults(config),
        *eval_faults(config),
        *best_faults(config),
        *unmet(config),
        *rate_faults(config.optim, config.optim.decay_steps or config.train.train_steps),
        *state_faults(config),
        *op_faults(config),
        *fp8_faults(config),
        *graph_faults(config),
        *tier_faults(config),
        *profile_faults(config.profile, config.train.train_steps),
    ]


def model_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in the model's shape."""
    model = config.model
    hidden, heads, rows = model.hidden_size, model.num_heads, longest_row(config)
    if hidden % heads and not model.head_size:
        text = f"model.hidden_size {hidden} is not a multiple of model.num_heads {heads}"
        yield {"model.hidden_size", "model.num_heads"}, text
    elif model.position == "rope" and (model.head_size or hidden // heads) % 2:
        got = f"{model.head_size}" if model.head_size else f"hidden_size {hidden} / num_heads {heads}"
        names = {"model.hidden_size", "model.num_heads", "model.head_size", "model.position"}
        yield names, f"model.position rope needs an even head size, got {got}"
    if model.rope_scaling == "llama3" and model.rope_high_factor <= model.rope_low_factor:
        low, high = model.rope_low_factor, model.rope_high_factor
        text = f"model.rope_high_factor {high:g} is not above model.rope_low_factor {low:g}"
        yield {"model.rope_high_factor", "model.rope_low_factor", "model.rope_scaling"}, text
    if 0 < model.attention_window < rows:
        text = f"model.attention_window {model.attention_window} is less than rows of {rows} tokens"
        text += ", and may be of some layers alone: a shorter train.seq_length, or, if it is of all layers, "
        text += f"--model.attention-window 0 --model.window {model.attention_window}"
        yield {"model.attention_window", "train.seq_length"}, text
    if model.window and model.window_every == 1:
        text = f"model.window_every 1 lets every layer see all tokens, and model.window is {model.window}"
        yield {"model.window", "model.window_every"}, f"{text}: --model.window-every 2, or --model.window 0"
    if heads % (model.num_kv_heads or heads):
        text = f"model.num_heads {heads} is not a multiple of model.num_kv_heads {model.num_kv_heads}"
        yield {"model.num_heads", "model.num_kv_heads"}, text


def expert_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in the experts' numbers."""
    model = config.model
    if not model.num_experts:
        return
    if model.experts_per_token > model.num_experts:
        text = f"model.experts_per_token {model.experts_per_token} is more than model.num_experts {model.num_experts}: "
        text += f"--model.experts-per-token {model.num_experts}"
        yield {"model.experts_per_token", "model.num_experts"}, text
    if not any(has_experts(model, layer) for layer in range(model.num_layers)):
        names = {"model.num_experts", "model.num_layers", "model.first_dense_layers", "model.moe_every"}
        text = f"model.num_experts {model.num_experts} and none of model.num_layers {model.num_layers} has experts: "
        text += "--model.first-dense-layers 0 --model.moe-every 1"
        yield names, text


def expert_cut_faults(config: Config, world_size: int) -> Iterator[Fault]:
    """Yield the first fault in the cut of experts by ep."""
    model, parallel = config.model, config.parallel
    ep, tp, cp = parallel.ep, parallel.tp, parallel.cp
    dp = parallel.dp or world_size // ranks_a_sample(config)
    lent, axes = dp * cp, f"dp {dp} * cp {cp}"
    if parallel.etp == "1":
        lent, axes = lent * tp, f"{axes} * tp {tp}"
    names = {"parallel.ep", "parallel.etp", "parallel.dp", "parallel.cp", "parallel.tp", "parallel.pp"}
    if ep == 1:
        return
    if lent % ep:
        yield names, f"parallel.ep {ep} does not divide {axes}, of which it borrows: --ep {math.gcd(lent, ep)}"
    elif model.num_experts % ep:
        text = f"parallel.ep {ep} does not divide model.num_experts {model.num_experts}"
        yield {"parallel.ep", "model.num_experts"}, f"{text}: --ep {math.gcd(math.gcd(lent, model.num_experts), ep)}"
    elif parallel.etp == "1" and tp > 1 and not cuts_tokens(config):
        text = f"parallel.etp 1 needs tokens that are cut over parallel.tp {tp}: --etp tp"
        yield {*names, "parallel.sequence_parallel", "train.micro_batch_size", "train.seq_length"}, text


def cut_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in the model's cut by tp."""
    model, parallel = config.model, config.parallel
    tp, heads, kv_heads = parallel.tp, model.num_heads, model.num_kv_heads or model.num_heads
    sizes = {"model.num_heads": heads, "model.ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size}
    if model.num_experts and parallel.etp == "tp":
        sizes["model.expert_ffn_hidden_size"] = model.expert_ffn_hidden_size or sizes["model.ffn_hidden_size"]
    for name, size in sizes.items():
        if size % tp:
            yield {name, "parallel.tp"}, f"{name} {size} is not a multiple of parallel.tp {tp}"
    if kv_heads % tp and tp % kv_heads and kv_heads != heads:  # several ranks may hold the same one; one fault, not two
        text = f"model.num_kv_heads {kv_heads} and parallel.tp {tp}: one must divide the other"
        yield {"model.num_kv_heads", "parallel.tp"}, text
    sizes_of_batch = [config.train.micro_batch_size * length for length in row_lengths(config)]
    num_tokens = next((size for size in sizes_of_batch if size % tp), sizes_of_batch[0])
    if parallel.sequence_parallel == "on" and num_tokens % tp:
        names = {"parallel.sequence_parallel", "parallel.tp", "train.micro_batch_size", "train.seq_length"}
        text = f"parallel.sequence_parallel cuts the {num_tokens} tokens of a micro-batch over parallel.tp {tp}"
        yield names, f"{text}, which does not divide them"
    elif parallel.tp_overlap_parts > 1 and tp > 1 and not cuts_tokens(config):
        text = f"parallel.tp_overlap_parts {parallel.tp_overlap_parts} is for tokens that are cut over tp"
        cut = f"parallel.sequence_parallel {parallel.sequence_parallel} does not cut {num_tokens} over {tp}"
        names = {"parallel.tp_overlap_parts", "parallel.sequence_parallel", "parallel.tp"}
        yield names, f"{text}: {cut}: --tp-overlap-parts 1"


def context_faults(config: Config) -> Iterator[Fault]:
    """Yield the first fault in the cut of rows by cp."""
    model, parallel, lengths = config.model, config.parallel, row_lengths(config)
    tp, cp, method = parallel.tp, parallel.cp, parallel.cp_method
    heads, kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
    cuts_heads = not heads % (tp * cp) and not (kv_heads % (tp * cp) and tp * cp % kv_heads)
    num_parts = 2 * cp if gathers_keys(config) else cp
    names = {"parallel.cp", "parallel.cp_method", "parallel.tp"}
    if cp == 1 or heads % tp:
        return
    if method == "ulysses" and not cuts_heads:
        has = f"{heads} heads" + (f", {kv_heads} of keys and values" if kv_heads != heads else "")
        text = f"parallel.tp {tp} * parallel.cp {cp} ranks do not share {has} evenly, as cp_method ulysses needs"
        yield {*names, "model.num_heads", "model.num_kv_heads"}, f"{text}: --cp-method allgather"
    elif odd := [length for length in lengths if length % num_parts]:
        name = "train.seq_length" if odd[0] == lengths[0] else "a seq_length of data.mixture,"
        cuts = f"{num_parts} parts, into which parallel.cp {cp} cuts rows"
        if num_parts > cp:
            cuts += " for cp_method allgather"
        way = f"--cp {math.gcd(num_parts, *lengths) * cp // num_parts or 1}"
        if cuts_heads and not any(length % cp for length in lengths):
            way = "--cp-method ulysses"
        yield {*names, "train.seq_length", "data.mixture"}, f"{name} {odd[0]} is not a multiple of {cuts}: {way}"


def stage_faults(config: Config) -> Iterator[Fault]:
    """Yield the first fault in the model's cut into stages."""
    num_layers, pp, virtual = config.model.num_layers, config.parallel.pp, config.parallel.virtual_stages
    names, stages = {"model.num_layers", "parallel.pp"}, f"parallel.pp {pp}"
    if virtual > 1:
        names, stages = names | {"parallel.virtual_stages"}, f"{stages} * parallel.virtual_stages {virtual}"
    how = config.parallel.pipeline_layout
    try:
        sizes = layers_by_hand(how)
    except ValueError:
        sizes = None
    if pp == 1 < virtual:
        text = f"parallel.virtual_stages {virtual} is for several pipeline ranks, parallel.pp is 1: --vpp 1"
        yield {"parallel.virtual_stages", "parallel.pp"}, text
    elif num_layers < pp * virtual:
        yield names, f"model.num_layers {num_layers} is less than {stages}"
    elif sizes is None:
        yield {"parallel.pipeline_layout"}, f'parallel.pipeline_layout is even, cost or as in "9,7", got {how!r}'
    elif sizes and (len(sizes) != pp * virtual or sum(sizes) != num_layers or min(sizes) < 1):
        text = f"parallel.pipeline_layout {how} has not {num_layers} layers on {pp * virtual} stages, 1 or more on each"
        yield {*names, "parallel.pipeline_layout"}, text


def recompute_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault in how many layers are made again: more than the longest stage has."""
    num_layers, parallel, number = config.model.num_layers, config.parallel, config.train.recompute_num_layers
    num_stages = parallel.pp * parallel.virtual_stages
    most = num_layers - num_stages + 1 if parallel.pipeline_layout == "cost" else -(-num_layers // num_stages)
    with suppress(ValueError):  # a layout that is not well written has its own fault
        most = max(layers_by_hand(parallel.pipeline_layout), default=most)
    if config.train.recompute != "none" and number > most >= 1:
        names = {"train.recompute_num_layers", "model.num_layers", "parallel.pp", "parallel.virtual_stages"}
        has = f"the {most} layers that a stage has at most" if num_stages > 1 else f"model.num_layers {num_layers}"
        yield names, f"train.recompute_num_layers {number} is more than {has}: --recompute-num-layers {most}"


def layout_faults(config: Config, world_size: int) -> Iterator[Fault]:
    """Yield the first fault between the layout, the number of processes and the batch sizes."""
    parallel, train = config.parallel, config.train
    axes = {"parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp"}
    ranks = ranks_a_sample(config) * (parallel.dp or 1)
    dp_size = parallel.dp or world_size // ranks
    micro, batch, accumulation = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    fields = {*axes, "train.micro_batch_size", "train.global_batch_size"}
    if world_size % ranks or (parallel.dp and ranks != world_size):
        dp = f" * dp {parallel.dp}" if parallel.dp else ""
        cp = f" * cp {parallel.cp}" if parallel.cp > 1 else ""
        text = f"tp {parallel.tp}{cp} * pp {parallel.pp}{dp} needs {ranks} processes, started are {world_size}"
        yield axes, f"{text}: trainer launch --nproc-per-node {ranks} ..."
    elif batch % (micro * dp_size):
        text = f"train.global_batch_size {batch} is not a multiple of micro_batch_size {micro} * dp {dp_size}"
        if batch % dp_size == 0:
            way = f"--micro-batch-size {math.gcd(batch // dp_size, micro)}"
        else:
            way = f"--global-batch-size {math.ceil(batch / (micro * dp_size)) * micro * dp_size}"
        yield fields, f"{text}: {way}"
    elif accumulation and accumulation * micro * dp_size != batch:
        text = f"train.gradient_accumulation_steps {accumulation} contradicts global_batch_size {batch} / "
        count = batch // (micro * dp_size)
        text += f"(micro_batch_size {micro} * dp {dp_size}) = {count}: --gradient-accumulation-steps {count}"
        yield {*fields, "train.gradient_accumulation_steps"}, text
    elif faults := list(train.faults("train")):
        yield from faults
    else:
        yield from ramp_faults(train, dp_size)


def shard_faults(config: Config, world_size: int) -> Iterator[Fault]:
    """Yield a fault if dp is not a number of whole shard groups."""
    parallel = config.parallel
    dp, shard = parallel.dp or world_size // ranks_a_sample(config), parallel.dp_shard
    if dp and shard and dp % shard:
        nearest = max(size for size in range(1, dp + 1) if dp % size == 0 and size <= shard)
        text = f"parallel.dp_shard {shard} does not divide the {dp} ranks of dp: --dp-shard {nearest}"
        yield {"parallel.dp_shard", "parallel.dp", "parallel.tp", "parallel.cp", "parallel.pp"}, text


def data_faults(config: Config) -> Iterator[Fault]:
    """Yield faults between stores and their weights, and in positions."""
    data, model, valid = config.data, config.model, config.data.valid
    yield from data.faults("data") + valid.faults("data.valid")
    unmasked = {
        "data.reset_positions": data.reset_positions,
        "data.packing": data.packing != "concat",
        "data.valid.packing": valid.packing != "concat",
        "data.valid_sets": any(valid_set.packing != "concat" for valid_set in data.valid_sets),
    }
    for name in [name for name, is_so in unmasked.items() if is_so]:
        if not data.document_mask and model.position == "rope":
            text = f"{name} with model.position rope puts earlier documents at negative distances, as attention "
            text += "is not masked by document: --data.document-mask true, or --model.position learned"
            yield {name, "data.document_mask", "model.position"}, text
    rows, seq_length, longest = model.num_positions, config.train.seq_length, longest_row(config)
    if model.position == "learned" and 0 < rows < seq_length:
        text = f"model.num_positions {rows} is less than train.seq_length {seq_length}: --train.seq-length {rows}"
        yield {"model.num_positions", "train.seq_length"}, text
    elif model.position == "learned" and (rows or seq_length) < longest:
        text = f"data.mixture has a seq_length of {longest}, and there are {rows or seq_length} learned positions"
        yield {"model.num_positions", "data.mixture"}, f"{text}: --model.num-positions {longest} from the run's start"
    if data.pad_to_multiple_of:
        text = "data.pad_to_multiple_of is for loops of your own: the trainer's rows keep their length"
        yield {"data.pad_to_multiple_of"}, text


def rate_faults(optim: OptimConfig, decay: int) -> Iterator[Fault]:
    """Yield faults in the learning-rate schedule, which ends after `decay` steps."""
    if optim.min_lr > optim.lr:
        yield {"optim.min_lr", "optim.lr"}, f"optim.min_lr {optim.min_lr:g} is above optim.lr {optim.lr:g}"
    if (optim.schedule == "wsd") != (optim.wsd_decay_steps > 0):
        text = f"optim.wsd_decay_steps {optim.wsd_decay_steps} is for optim.schedule wsd, not {optim.schedule}"
        if optim.schedule == "wsd":
            text = f"optim.schedule wsd needs the steps of its fall: --optim.wsd-decay-steps {max(decay // 10, 1)}"
        yield {"optim.wsd_decay_steps", "optim.schedule"}, text
    elif 0 <= decay - optim.warmup_steps < optim.wsd_decay_steps:
        text = f"optim.wsd_decay_steps {optim.wsd_decay_steps} and optim.warmup_steps {optim.warmup_steps} are more "
        names = {"optim.wsd_decay_steps", "optim.warmup_steps", "optim.decay_steps", "train.train_steps"}
        yield names, f"{text}than the {decay} steps in all"
    if optim.cool_down_steps <= 0 < optim.cool_down_from + optim.cool_down_lr:
        text = "optim.cool_down_from and cool_down_lr are of a cool-down: --cool-down 100"
        yield {"optim.cool_down_from", "optim.cool_down_lr", "optim.cool_down_steps"}, text
    if optim.warmup_steps > decay:
        text = f"optim.warmup_steps {optim.warmup_steps} is more than the {decay} steps in all: --optim.warmup-steps 0"
        yield {"optim.warmup_steps", "optim.decay_steps", "train.train_steps"}, text


def state_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in how the state is kept, and in when to save."""
    optim, save = config.optim, config.checkpoint
    of_name = ["momentum"] if optim.name == "sgd" else ["beta1", "beta2"]
    of_name += ["muon_momentum"] * (optim.name == "muon")
    decays = {name: getattr(optim, name) for name in of_name}
    if optim.moments == "bf16" and max(decays.values()) > 0.99:
        shown = ", ".join(f"{name} {decay:g}" for name, decay in decays.items())
        text = f"optim.moments bf16 is too coarse for {shown}: each 0.99 at most"
        yield {"optim.moments", *(f"optim.{name}" for name in decays)}, text
    if optim.master == "split" and save.overlap == "on":
        text = "checkpoint.overlap on needs optim.master wide: split masters are put together in the gradients' memory"
        yield {"optim.master", "checkpoint.overlap"}, text
    if config.train.initial_loss_scale < config.train.min_loss_scale:
        first, smallest = config.train.initial_loss_scale, config.train.min_loss_scale
        text = (
            f"train.initial_loss_scale {first:g} is below train.min_loss_scale {smallest:g}: --min-loss-scale {first:g}"
        )
        yield {"train.initial_loss_scale", "train.min_loss_scale"}, text
    if save.save_interval_s > 0 and not save.save:
        text = f"checkpoint.save_interval_s {save.save_interval_s:g} needs checkpoint.save"
        yield {"checkpoint.save_interval_s", "checkpoint.save"}, text
    if -1 < save.save_interval_s < 0:
        text = f"checkpoint.save_interval_s must be -1, 0 or seconds, got {save.save_interval_s:g}"
        yield {"checkpoint.save_interval_s"}, text


def tier_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in what is written of the tiers."""
    try:
        first = None if (tiers := tiers_of(config)) is None else tiers.first
    except UserError as error:
        yield {"checkpoint.save"}, f"checkpoint.save: {error.message}: {error.hint}"
        return
    if first is not None and first.of_node and config.parallel.zero_stage == 0:
        text = f"checkpoint.save {first.url} is each node's own, for which parallel.zero_stage must be 1, got 0"
        yield {"checkpoint.save", "parallel.zero_stage"}, text
