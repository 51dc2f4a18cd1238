"""What a rank keeps for its backward passes, counted from the shapes of the model and of a micro-batch.

In bytes, of the tensors that the graph of a pass holds until its backward, and of those that wait from B to W. Queries,
keys and values are views of one tensor; with QK-norm they are new ones, beside what the norm reads. Context parallel
makes new ones too, of other heads and tokens, and another result. Rows of labels and losses are not counted, and what a
pass takes for itself is in `trainer/run/temporaries.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from ckptkit import rank_stages
from trainer.config import Config
from trainer.config.eight_bits import keeps_columns
from trainer.config.resolve import cuts_tokens, gathers_keys, has_experts, layout_of, longest_row, schedule_of
from trainer.engine import DTYPES
from trainer.model.host_inputs import NUM_ON_DEVICE
from trainer.model.recompute import Recompute
from trainer.model.stages import stage_ranges
from trainer.model.table import parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.pipeline.actions import peak_live
from trainer.pipeline.schedules import rank_actions

CHOICES: dict[str, dict[str, Any]] = {  # a name of each, and the options that they set
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "selective of mlp": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "selective of attention": {"recompute": "selective", "recompute_modules": ("attention",)},
    "selective of mlp,attention": {"recompute": "selective", "recompute_modules": ("mlp", "attention")},
    "full that keeps attention": {"recompute": "full", "recompute_keep": "attention"},
    "full": {"recompute": "full"},
}
PLAIN: dict[str, Any] = {"recompute_modules": (), "recompute_keep": "nothing"}


def kept_by_choice(config: Config) -> dict[str, int]:
    """Return what the rank that keeps the most keeps with each choice of what is made again, of the same layers."""
    trains = {name: replace(config.train, **(PLAIN | options)) for name, options in CHOICES.items()}
    return {
        name: max(activation_bytes(replace(config, train=train), pp) for pp in range(config.parallel.pp))
        for name, train in trains.items()
    }


def activation_bytes(config: Config, pp: int) -> int:
    """Return what a rank keeps at most, of the passes that the schedule keeps live.

    The last stage also keeps the logits, or the gradient of their input if they are made in parts.
    """
    parallel, train, layout = config.parallel, config.train, layout_of(config)
    sizes = Sizes.of(config)
    row = rank_actions(schedule_of(config), parallel.pp, train.gradient_accumulation_steps, parallel.virtual_stages, pp)
    layers = stage_layers_of(config, pp)
    on_host = host_input_bytes(config, layers)
    until_b = sizes.turns + max(sum(each.layer(again) for each, again in stage) for stage in layers) - on_host
    num_bytes = min(NUM_ON_DEVICE * sizes.stream, on_host)  # on their way, or read
    num_bytes += peak_live(row, until_b, max(sum(each.layer_until_w for each, _ in stage) for stage in layers))
    num_bytes += sizes.stream * (pp == 0 and any(action.kind == "W" for action in row))  # the embedding's gradient
    if pp == parallel.pp - 1:
        in_flight = peak_live([action for action in row if action.stage == layout.num_stages - 1])
        num_bytes += sizes.head_of(config) * in_flight
    return num_bytes


def host_input_bytes(config: Config, layers: "list[list[tuple[Sizes, Recompute]]]") -> int:
    """Return what a pass of the stage that has the most keeps of inputs of layers in the host's memory."""
    if not config.train.recompute_offload or config.train.device == "cpu":
        return 0
    return max(sum([each.stream for each, again in stage if again.is_full][:-1]) for stage in layers)


def host_bytes(config: Config, pp: int) -> int:
    """Return what a rank has of inputs of layers in the host's memory, of the passes that the schedule keeps live."""
    parallel, number = config.parallel, config.train.gradient_accumulation_steps
    row = rank_actions(schedule_of(config), parallel.pp, number, parallel.virtual_stages, pp)
    return peak_live([action for action in row if action.kind != "W"]) * host_input_bytes(
        config, stage_layers_of(config, pp)
    )


def stage_layers_of(config: Config, pp: int) -> "list[list[tuple[Sizes, Recompute]]]":
    """Return the sizes of each layer of each stage of a rank, and what of it is made again."""
    layout, of_kind = layout_of(config), {kind: Sizes.of(config, experts=kind) for kind in (False, True)}
    ranges = stage_ranges(config, parameter_table(config), layout.num_stages)
    return [
        [
            (of_kind[has_experts(config.model, number)], Recompute.of_layer(config.train, place))
            for place, number in enumerate(ranges[stage])
        ]
        for stage in rank_stages(layout, pp)
    ]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the activations of one micro-batch on one rank, in a layer with experts or in another.

    `stream` is one as wide as the residual stream, of this rank's tokens if they are cut; `whole_stream` of all tokens.
    `numbers` is what a norm keeps beside its input, `queries` those of its heads, `heads` these with keys and values,
    `qkv` all between the first norm and attention, `result` that of attention with its lse, `moved` what an exchange
    makes of it, `packed` what the nonlinearity reads, `product` what it makes, `turns` the angles. With experts
    `routes` are scores, rows' numbers and weights, `rows` is as wide as the stream with a row for each expert of a
    token. Inputs that are kept in eight bits take `spared` less.
    """

    stream: int
    whole_stream: int
    numbers: int
    queries: int
    heads: int
    qkv: int
    result: int
    moved: int
    packed: int
    product: int
    turns: int
    logits: int
    layer_until_w: int
    routes: int = 0
    rows: int = 0
    spared: int = 0

    @classmethod
    def of(cls, config: Config, *, experts: bool = False) -> "Sizes":
        """Return those of the longest rows."""
        model, train, tp, cp = config.model, config.train, config.parallel.tp, config.parallel.cp
        dtype = DTYPES[train.precision]
        wide, itemsize = wide_dtype(dtype).itemsize, dtype.itemsize
        num_tokens = train.micro_batch_size * longest_row(config) // cp
        num_own = num_tokens // tp if cuts_tokens(config) else num_tokens
        num_heads, num_kv_heads = model.num_heads // tp, max(model.num_kv_heads // tp, 1)
        queries, keys = (number * model.head_size * num_tokens * itemsize for number in (num_heads, num_kv_heads))
        count = 1 if model.norm == "rmsnorm" else 2
        trades = cp > 1 and not gathers_keys(config)  # tokens for heads; fewer of these than ranks are repeated
        qkv = queries + 2 * keys * (max(cp // num_kv_heads, 1) if trades else 1)
        if model.qk_norm:
            qkv += queries + keys * (2 if trades else 1)
            qkv += (num_heads + num_kv_heads) * num_tokens * count * wide * (count == 2)
        stream, whole_stream = (model.hidden_size * number * itemsize for number in (num_own, num_tokens))
        ffn_size, num_rows = model.ffn_hidden_size, 0
        if experts:  # of all experts of a token together
            borrows_tp, share = config.parallel.etp == "1", min(config.parallel.moe_rows, config.parallel.ep)
            num_rows = int((num_own if borrows_tp else num_tokens) * model.experts_per_token * share)
            ffn_size = model.expert_ffn_hidden_size * model.num_shared_experts
        product = ffn_size // tp * num_tokens * itemsize
        if experts:
            product += model.expert_ffn_hidden_size // (1 if borrows_tp else tp) * num_rows * itemsize
        packed = product * (2 if model.activation == "swiglu" else 1)
        narrow = config.fp8.wgrad == "fp8"
        # inputs and output gradients of the linears; the gradients of biases that are added after a sum
        until_w = 4 * whole_stream + 2 * queries + 2 * keys + packed + product
        until_w = (until_w // itemsize if narrow else until_w) + 2 * stream * (model.bias and cuts_tokens(config))
        return cls(
            stream, whole_stream,
            numbers=count * num_own * wide if config.ops.norm == "csrc" else 0,
            queries=queries,
            heads=queries + 2 * keys,
            qkv=qkv,
            result=queries + num_heads * num_tokens * wide,
            moved=queries if trades else 0,
            packed=packed,
            product=product,
            turns=model.head_size * num_tokens * wide if model.position == "rope" else 0,
            logits=model.vocab_size // tp * num_tokens * itemsize,
            layer_until_w=until_w,
            routes=num_rows * (8 + wide) + num_own * 2 * model.num_experts * wide if experts else 0,
            rows=num_rows * model.hidden_size * itemsize,
            spared=keeps_columns(config, experts=experts) * (stream - stream // itemsize),
        )  # fmt: skip

    def head_of(self, config: Config) -> int:
        """Return what the head keeps until its backward: its norm's, its input or the gradient, the logits if whole."""
        in_parts = 0 < int(config.train.max_logits_gib * 2**30) < self.logits
        return self.stream + self.numbers + self.whole_stream + (0 if in_parts else self.logits)

    def sums_of(self, config: Config) -> int:
        """Return what a kernel of attention sums gradients in on GPUs: of queries, and of keys that queries share."""
        if config.train.device == "cpu":
            return 0
        shared = self.heads - self.queries if config.model.num_kv_heads < config.model.num_heads else 0
        dtype = DTYPES[config.train.precision]
        return (self.queries + shared) * wide_dtype(dtype).itemsize // dtype.itemsize

    def layer(self, again: Recompute) -> int:
        """Return what a layer keeps until its backward."""
        if again.is_full:  # with the weights of rows
            return self.stream + self.result * again.keeps_attention + self.routes
        norm = self.stream if again.modules else 2 * self.stream + self.numbers
        attention = 0 if "attention" in again.modules else self.qkv + self.result + self.moved
        spared = 0 if again.modules else self.spared
        return 2 * norm - spared + attention + self.routes + (0 if "mlp" in again.modules else self.packed)
