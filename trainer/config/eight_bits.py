"""Which weights are multiplied in eight bits: the same ones under every layout, or the layout is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from threefold.options import Fault
from trainer.config import Config
from trainer.config.resolve import cuts_tokens, gathers_keys, has_experts, resolved_model, row_lengths


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight of a linear within a block, [out, in], and the sides of a rank's part of it."""

    name: str
    shape: tuple[int, int]
    own: tuple[int, int]


def linears_of(config: Config, layer: int) -> Iterator[list[Linear]]:
    """Yield the linears of a block: attention's and those of its MLP, or of shared experts.

    Those that are one matrix for the arithmetic come together: all of them or none are in eight bits.
    """
    model, tp = resolved_model(config.model), config.parallel.tp
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_size, model.num_kv_heads * model.head_size

    def column(name: str, size: int, parts: int = tp) -> Linear:
        return Linear(f"layers.{layer}.{name}.weight", (size, hidden), (size // parts, hidden))

    def row(name: str, size: int) -> Linear:
        return Linear(f"layers.{layer}.{name}.weight", (hidden, size), (hidden, size // tp))

    kv_parts = min(tp, model.num_kv_heads)
    yield [column("attn.q", queries), column("attn.k", keys, kv_parts), column("attn.v", keys, kv_parts)]
    yield [row("attn.out", queries)]
    prefix, size = "mlp", model.ffn_hidden_size
    if has_experts(model, layer):
        prefix, size = "mlp.shared", model.num_shared_experts * model.expert_ffn_hidden_size
    if size:
        names = ("gate", "up") if model.activation == "swiglu" else ("up",)
        yield [column(f"{prefix}.{name}", size) for name in names]
        yield [row(f"{prefix}.down", size)]


def eight_bit_names(config: Config) -> set[str]:
    """Return the names of the weights in eight bits."""
    if config.fp8.recipe == "off":
        return set()
    return {linear.name for group in _groups(config) if _why_left(config, group) is None for linear in group}


def keeps_columns(config: Config, *, experts: bool) -> int:
    """Return how many inputs of linears a layer keeps in eight bits alone: of q, k and v, and of gate and up.

    They are kept for gradients of weights that are products in eight bits, and not where tokens are cut over tp, or
    something is made again.
    """
    if config.fp8.wgrad != "fp8" or config.train.recompute != "none" or cuts_tokens(config):
        return 0
    names = eight_bit_names(config)
    layers = [layer for layer in range(config.model.num_layers) if has_experts(config.model, layer) == experts]
    inputs = ("attn.q",) if experts else ("attn.q", "mlp.up")
    number = sum(f"layers.{layer}.{name}.weight" in names for layer in layers for name in inputs)
    return number // max(len(layers), 1)


def keeps_weights(config: Config) -> bool:
    """Return whether weights in eight bits are kept from one use to the next.

    Where dp cuts them they are not there, and with one micro-batch a step each copy is used once.
    """
    return config.parallel.zero_stage < 3 and config.train.gradient_accumulation_steps > 1


def left_weights(config: Config) -> list[str]:
    """Return each kind of weight that stays as it is, with the reason: `mlp.down 40 x 24 is off 16`.

    Those of its matrix stay too: `attn.k 64 x 256 is off 128, and so attn.q, attn.v`.
    """
    if config.fp8.recipe == "off":
        return []
    reasons = (_why_left(config, group) for group in _groups(config))
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def fp8_faults(config: Config) -> Iterator[Fault]:
    """Yield faults in the products in eight bits: other precisions, patterns that fit nothing, parts that are off."""
    fp8, parallel = config.fp8, config.parallel
    if fp8.recipe == "off" or config.model.hidden_size % config.model.num_heads:
        return
    if config.train.precision == "fp16":
        text = f"fp8.recipe {fp8.recipe} has the range of bf16 beside it, and train.precision is fp16: --bf16"
        yield {"fp8.recipe", "train.precision"}, text
    if parallel.tp_overlap_parts > 1 and parallel.tp > 1:
        text = f"parallel.tp_overlap_parts {parallel.tp_overlap_parts} is for wider products than fp8.recipe "
        yield {"fp8.recipe", "parallel.tp_overlap_parts"}, f"{text}{fp8.recipe}: --tp-overlap-parts 1"
    groups = list(_groups(config))
    names = [linear.name for group in groups for linear in group]
    for pattern in fp8.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            text = f"fp8.skip {pattern} fits no weight of a linear in blocks; their names are such as {names[0]}"
            yield {"fp8.skip", "model.num_layers"}, text
    parts = [linear for group in groups if _why_left(config, group) is None for linear in group]
    if not parts:
        text = f"fp8.recipe {fp8.recipe} has no weight left: {left_weights(config)[0]}: --fp8 off"
        yield {"fp8.recipe", "fp8.skip", "model.hidden_size"}, text
    for linear in [each for each in parts if any(side % fp8.size for side in each.own)][:1]:
        text = "{} is {} x {} on each of ".format(linear.name, *linear.own)
        text += f"parallel.tp {parallel.tp} ranks, and fp8.recipe {fp8.recipe} takes multiples of {fp8.size}"
        yield {"fp8.recipe", "parallel.tp", *_sides(linear)}, f"{text}: {_way(config, linear)}"
    yield from _token_faults(config)


def _token_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault if a rank's tokens of a micro-batch, over which gradients of weights are summed, are off."""
    fp8, parallel = config.fp8, config.parallel
    if fp8.wgrad != "fp8":
        return
    for length in row_lengths(config):
        num_tokens = config.train.micro_batch_size * length // parallel.cp
        if fp8.recipe == "blockwise" and gathers_keys(config):  # two runs of each row
            num_tokens = length // (2 * parallel.cp)
        if num_tokens % fp8.size:
            text = (
                f"fp8.wgrad fp8 adds up {num_tokens} tokens of a rank, and fp8.recipe {fp8.recipe} takes multiples of "
            )
            names = {"fp8.wgrad", "fp8.recipe", "train.micro_batch_size", "train.seq_length", "parallel.cp"}
            yield names, f"{text}{fp8.size}: --fp8.wgrad bf16"
            return


def _groups(config: Config) -> Iterator[list[Linear]]:
    for layer in range(config.model.num_layers):
        yield from linears_of(config, layer)


def _why_left(config: Config, group: list[Linear]) -> str | None:
    """Return why the weights of a matrix stay as they are, None if they do not."""
    size, skip = config.fp8.size, config.fp8.skip
    off = [linear for linear in group if any(side % size for side in linear.shape)]
    left = off or [linear for linear in group if any(fnmatchcase(linear.name, pattern) for pattern in skip)]
    if not left:
        return None
    reason = " {} x {} is off {}".format(*off[0].shape, size) if off else " is left by fp8.skip"
    others = ", ".join(_kind(linear) for linear in group if linear is not left[0])
    return _kind(left[0]) + reason + (f", and so {others}" if others else "")


def _kind(linear: Linear) -> str:
    """Return the name of a weight within its layer: `attn.q`."""
    return linear.name.split(".", 2)[2].removesuffix(".weight")


def _sides(linear: Linear) -> set[str]:
    if ".attn." in linear.name:
        return {"model.num_heads", "model.num_kv_heads", "model.head_size", "model.hidden_size"}
    return {"model.ffn_hidden_size", "model.expert_ffn_hidden_size"}


def _way(config: Config, linear: Linear) -> str:
    """Return what to change: a size of the MLP that fits, or weights that stay as they are."""
    model, unit = config.model, config.fp8.size * config.parallel.tp
    if ".mlp." in linear.name and not has_experts(model, int(linear.name.split(".")[1])):
        size = resolved_model(model).ffn_hidden_size
        return f"--model.ffn-hidden-size {-(-size // unit) * unit}"
    return f'--fp8.skip "*.{_kind(linear)}.weight"'
