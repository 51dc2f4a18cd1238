"""Faults that several fields of a configuration make together."""

from threefold.errors import UserError
from threefold.needs import unmet
from threefold.options import Fault
from trainer.config import Config, OptimConfig
from trainer.config.resolve import cuts_tokens, layers_by_hand, longest_row, row_lengths, tiers_of


def cross_faults(config: Config, world_size: int) -> list[Fault]:
    """Return every fault that several fields make together; empty for a run that can start on `world_size` ranks."""
    return [
        *model_faults(config),
        *layout_faults(config, world_size),
        *data_faults(config),
        *unmet(config),
        *schedule_faults(config),
        *op_faults(config),
        *tier_faults(config),
    ]


def model_faults(config: Config) -> list[Fault]:
    """Return faults in the model's shape and in its cut by tp and pp."""
    model, tp = config.model, config.parallel.tp
    hidden, heads = model.hidden_size, model.num_heads
    sizes = {
        "model.num_heads": heads,
        "model.num_kv_heads": model.num_kv_heads or heads,
        "model.ffn_hidden_size": model.ffn_hidden_size or 4 * hidden,
    }
    faults: list[Fault] = []
    if hidden % heads and not model.head_size:
        text = f"model.hidden_size {hidden} is not a multiple of model.num_heads {heads}"
        faults.append(({"model.hidden_size", "model.num_heads"}, text))
    elif model.position == "rope" and (model.head_size or hidden // heads) % 2:
        got = f"{model.head_size}" if model.head_size else f"hidden_size {hidden} / num_heads {heads}"
        text = f"model.position rope needs an even head size, got {got}"
        faults.append(({"model.hidden_size", "model.num_heads", "model.head_size", "model.position"}, text))
    if model.rope_scaling == "llama3" and model.rope_high_factor <= model.rope_low_factor:
        low, high = model.rope_low_factor, model.rope_high_factor
        text = f"model.rope_high_factor {high:g} is not above model.rope_low_factor {low:g}"
        faults.append(({"model.rope_high_factor", "model.rope_low_factor", "model.rope_scaling"}, text))
    if 0 < model.attention_window < longest_row(config):
        text = f"model.attention_window {model.attention_window} is less than rows of {longest_row(config)} tokens"
        text += ", and sliding windows are not computed: a shorter train.seq_length"
        faults.append(({"model.attention_window", "train.seq_length"}, text))
    if heads % sizes["model.num_kv_heads"]:
        text = f"model.num_heads {heads} is not a multiple of model.num_kv_heads {model.num_kv_heads}"
        faults.append(({"model.num_heads", "model.num_kv_heads"}, text))
    kv_heads = sizes.pop("model.num_kv_heads")
    for name, size in sizes.items():
        if size % tp:
            faults.append(({name, "parallel.tp"}, f"{name} {size} is not a multiple of parallel.tp {tp}"))
    if kv_heads % tp and tp % kv_heads and kv_heads != heads:  # several ranks may hold the same one; one fault, not two
        text = f"model.num_kv_heads {kv_heads} and parallel.tp {tp}: one must divide the other"
        faults.append(({"model.num_kv_heads", "parallel.tp"}, text))
    sizes_of_batch = [config.train.micro_batch_size * length for length in row_lengths(config)]
    num_tokens = next((size for size in sizes_of_batch if size % tp), sizes_of_batch[0])
    if config.parallel.sequence_parallel == "on" and num_tokens % tp:
        names = {"parallel.sequence_parallel", "parallel.tp", "train.micro_batch_size", "train.seq_length"}
        text = f"parallel.sequence_parallel cuts the {num_tokens} tokens of a micro-batch over parallel.tp {tp}"
        faults.append((names, f"{text}, which does not divide them"))
    elif config.parallel.tp_overlap_parts > 1 and tp > 1 and not cuts_tokens(config):
        text = f"parallel.tp_overlap_parts {config.parallel.tp_overlap_parts} is for tokens that are cut over tp"
        cut = f"parallel.sequence_parallel {config.parallel.sequence_parallel} does not cut {num_tokens} over {tp}"
        names = {"parallel.tp_overlap_parts", "parallel.sequence_parallel", "parallel.tp"}
        faults.append((names, f"{text}: {cut}: --tp-overlap-parts 1"))
    return faults + stage_faults(config)


def stage_faults(config: Config) -> list[Fault]:
    """Return faults in the model's cut into stages."""
    num_layers, pp, virtual = config.model.num_layers, config.parallel.pp, config.parallel.virtual_stages
    names, stages = {"model.num_layers", "parallel.pp"}, f"parallel.pp {pp}"
    if virtual > 1:
        names, stages = names | {"parallel.virtual_stages"}, f"{stages} * parallel.virtual_stages {virtual}"
    if pp == 1 < virtual:
        text = f"parallel.virtual_stages {virtual} is for several pipeline ranks, parallel.pp is 1: --vpp 1"
        return [({"parallel.virtual_stages", "parallel.pp"}, text)]
    if num_layers < pp * virtual:
        return [(names, f"model.num_layers {num_layers} is less than {stages}")]
    how = config.parallel.pipeline_layout
    try:
        sizes = layers_by_hand(how)
    except ValueError:
        return [({"parallel.pipeline_layout"}, f'parallel.pipeline_layout is even, cost or as in "9,7", got {how!r}')]
    if sizes and (len(sizes) != pp * virtual or sum(sizes) != num_layers or min(sizes) < 1):
        text = f"parallel.pipeline_layout {how} has not {num_layers} layers on {pp * virtual} stages, 1 or more on each"
        return [({*names, "parallel.pipeline_layout"}, text)]
    return []


def layout_faults(config: Config, world_size: int) -> list[Fault]:
    """Return faults between the layout, the number of processes and the batch sizes."""
    parallel, train = config.parallel, config.train
    axes = {"parallel.tp", "parallel.pp", "parallel.dp"}
    ranks = parallel.tp * parallel.pp * (parallel.dp or 1)
    if world_size % ranks or (parallel.dp and ranks != world_size):
        dp = f" * dp {parallel.dp}" if parallel.dp else ""
        text = (
            f"tp {parallel.tp} * pp {parallel.pp}{dp} needs {ranks} processes, started are {world_size}: "
            f"trainer launch --nproc-per-node {ranks} ..."
        )
        return [(axes, text)]
    dp_size = parallel.dp or world_size // ranks
    micro, batch, accumulation = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    fields = {*axes, "train.micro_batch_size", "train.global_batch_size"}
    if batch % (micro * dp_size):
        text = f"train.global_batch_size {batch} is not a multiple of micro_batch_size {micro} * dp {dp_size}"
        return [(fields, text)]
    if accumulation and accumulation * micro * dp_size != batch:
        text = (
            f"train.gradient_accumulation_steps {accumulation} contradicts global_batch_size {batch} / "
            f"(micro_batch_size {micro} * dp {dp_size}) = {batch // (micro * dp_size)}"
        )
        return [({*fields, "train.gradient_accumulation_steps"}, text)]
    return []


def data_faults(config: Config) -> list[Fault]:
    """Return faults between stores and their weights, in positions, and an evaluation without a validation set."""
    faults = config.data.faults("data") + config.data.valid.faults("data.valid")
    if not config.data.document_mask and config.model.position == "rope":
        for name, is_so in (
            ("data.reset_positions", config.data.reset_positions),
            ("data.packing", config.data.packing != "concat"),
            ("data.valid.packing", config.data.valid.packing != "concat"),
        ):
            if is_so:
                text = (
                    f"{name} with model.position rope puts earlier documents at negative distances, as attention "
                    "is not masked by document: --data.document-mask true, or --model.position learned"
                )
                faults.append(({name, "data.document_mask", "model.position"}, text))
    rows, seq_length, longest = config.model.num_positions, config.train.seq_length, longest_row(config)
    if config.model.position == "learned" and 0 < rows < seq_length:
        text = f"model.num_positions {rows} is less than train.seq_length {seq_length}: --train.seq-length {rows}"
        faults.append(({"model.num_positions", "train.seq_length"}, text))
    elif config.model.position == "learned" and (rows or seq_length) < longest:
        text = f"data.mixture has a seq_length of {longest}, and there are {rows or seq_length} learned positions"
        faults.append(
            ({"model.num_positions", "data.mixture"}, f"{text}: --model.num-positions {longest} from the run's start")
        )
    if config.data.pad_to_multiple_of:
        text = "data.pad_to_multiple_of is for loops of your own: the trainer's rows keep their length"
        faults.append(({"data.pad_to_multiple_of"}, text))
    valid = config.data.valid
    if config.train.eval_interval and not valid.stores and valid.order == "permuted":
        text = f"train.eval_interval {config.train.eval_interval} needs data.valid.stores"
        faults.append(({"train.eval_interval", "data.valid.stores"}, text))
    return faults


def rate_faults(optim: OptimConfig, decay: int) -> list[Fault]:
    """Return faults in the learning-rate schedule, which ends after `decay` steps."""
    faults: list[Fault] = []
    if optim.min_lr > optim.lr:
        text = f"optim.min_lr {optim.min_lr:g} is above optim.lr {optim.lr:g}"
        faults.append(({"optim.min_lr", "optim.lr"}, text))
    if (optim.schedule == "wsd") != (optim.wsd_decay_steps > 0):
        text = f"optim.wsd_decay_steps {optim.wsd_decay_steps} is for optim.schedule wsd, not {optim.schedule}"
        if optim.schedule == "wsd":
            text = f"optim.schedule wsd needs the steps of its fall: --optim.wsd-decay-steps {max(decay // 10, 1)}"
        faults.append(({"optim.wsd_decay_steps", "optim.schedule"}, text))
    elif 0 <= decay - optim.warmup_steps < optim.wsd_decay_steps:
        text = f"optim.wsd_decay_steps {optim.wsd_decay_steps} and optim.warmup_steps {optim.warmup_steps} are more "
        names = {"optim.wsd_decay_steps", "optim.warmup_steps", "optim.decay_steps", "train.train_steps"}
        faults.append((names, f"{text}than the {decay} steps in all"))
    if optim.cool_down_steps <= 0 < optim.cool_down_from + optim.cool_down_lr:
        text = "optim.cool_down_from and cool_down_lr are of a cool-down: --cool-down 100"
        faults.append(({"optim.cool_down_from", "optim.cool_down_lr", "optim.cool_down_steps"}, text))
    if optim.warmup_steps > decay:
        text = f"optim.warmup_steps {optim.warmup_steps} is more than the {decay} steps in all: --optim.warmup-steps 0"
        faults.append(({"optim.warmup_steps", "optim.decay_steps", "train.train_steps"}, text))
    return faults


def schedule_faults(config: Config) -> list[Fault]:
    """Return faults in the schedule, in how the state is kept, and in when to save."""
    optim, save = config.optim, config.checkpoint
    faults = rate_faults(optim, optim.decay_steps or config.train.train_steps)
    if optim.moments == "bf16" and max(optim.beta1, optim.beta2) > 0.99:
        text = f"optim.moments bf16 is too coarse for beta1 {optim.beta1:g}, beta2 {optim.beta2:g}: each 0.99 at most"
        faults.append(({"optim.moments", "optim.beta1", "optim.beta2"}, text))
    if optim.master == "split" and save.overlap == "on":
        text = "checkpoint.overlap on needs optim.master wide: split masters are put together in the gradients' memory"
        faults.append(({"optim.master", "checkpoint.overlap"}, text))
    if save.keep_best and save.keep_best_metric == "val_loss" and not config.train.eval_interval:
        text = f"checkpoint.keep_best {save.keep_best} by val_loss needs train.eval_interval"
        faults.append(({"checkpoint.keep_best", "checkpoint.keep_best_metric", "train.eval_interval"}, text))
    if save.save_interval_s > 0 and not save.save:
        text = f"checkpoint.save_interval_s {save.save_interval_s:g} needs checkpoint.save"
        faults.append(({"checkpoint.save_interval_s", "checkpoint.save"}, text))
    if -1 < save.save_interval_s < 0:
        text = f"checkpoint.save_interval_s must be -1, 0 or seconds, got {save.save_interval_s:g}"
        faults.append(({"checkpoint.save_interval_s"}, text))
    return faults


def op_faults(config: Config) -> list[Fault]:
    """Return faults between the forms of ops and the precision."""
    ops, faults = config.ops, []
    for op, form in (("norm", ops.norm), ("adamw", ops.adamw)):
        if form == "apex" and config.train.precision == "fp64":
            text = f"ops.{op} apex is for precisions bf16 and fp32: --ops.{op} csrc"
            faults.append(({f"ops.{op}", "train.precision"}, text))
    if ops.rope != "csrc" and config.model.position != "rope" and not config.model.qk_norm:
        text = f"ops.rope {ops.rope} is for rotary positions and norms of heads: --model.position rope"
        faults.append(({"ops.rope", "model.position", "model.qk_norm"}, text))
    if ops.adamw != "csrc" and config.optim.moments == "bf16":
        text = f"ops.adamw {ops.adamw} has no moments of another dtype than the masters': --optim.moments wide"
        faults.append(({"ops.adamw", "optim.moments"}, text))
    return faults


def tier_faults(config: Config) -> list[Fault]:
    """Return faults in what is written of the tiers."""
    try:
        tiers = tiers_of(config)
    except UserError as error:
        return [({"checkpoint.save"}, f"checkpoint.save: {error.message}: {error.hint}")]
    if tiers is not None and tiers.first.of_node and config.parallel.zero_stage == 0:
        text = f"checkpoint.save {tiers.first.url} is each node's own, for which parallel.zero_stage must be 1, got 0"
        return [({"checkpoint.save", "parallel.zero_stage"}, text)]
    return []
