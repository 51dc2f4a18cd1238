"""The shape of a Hugging Face model in the trainer's words, and the tensors that a run has of it. Pure."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ckptkit.model.tensor import Box, Cut, Placement

ROUND_VOCAB_TO = 128  # as the trainer's default
BEYOND_KEYS = ("attention_bias", "mlp_bias", "norms", "wide_qk_norm", "beyond")  # of what the trainer does not train
CAP = "logit_softcap"  # a key of a model that has it
EXPERT_KEYS = (  # of a model that has experts
    "num_experts", "experts_per_token", "expert_ffn_hidden_size", "num_shared_experts", "first_dense_layers",
    "moe_every", "router_score", "router_norm_topk", "router_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The shape of a model in the trainer's words: the fields are keys of its `[model]` table, or BEYOND_KEYS.

    Layers with experts are those behind `first_dense_layers` whose number, from 1 on, `moe_every` divides: 4, 6, ...
    for 2 and 2. An expert is `expert_ffn_hidden_size` wide, or as an MLP if that is 0.

    `norms` are before, after or on both sides of attention and MLP. `attention_bias` and `mlp_bias` are biases of one
    of the two alone. `attention_window` is a window of some layers, which `window_every` cannot name. `beyond` are
    phrases of what else has no place in a `[model]` table.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_hidden_size: int
    vocab_size: int
    norm_eps: float
    norm: str = "rmsnorm"
    position: str = "rope"
    num_positions: int = 0
    activation: str = "swiglu"
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0
    rope_original_length: int = 8192
    window: int = 0
    window_every: int = 0
    attention_window: int = 0
    logit_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    moe_every: int = 1
    router_score: str = "softmax"
    router_norm_topk: bool = True
    router_scale: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    norms: str = "before"
    wide_qk_norm: bool = False
    beyond: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the keys of a `[model]` table: EXPERT_KEYS with experts, BEYOND_KEYS and CAP if they say something."""
        values = asdict(self) | {"beyond": list(self.beyond)}
        left = {field.name for field in fields(self) if getattr(self, field.name) == field.default}
        left &= {*BEYOND_KEYS, CAP}
        left |= {*EXPERT_KEYS} if not self.num_experts else set()
        return {key: value for key, value in values.items() if key not in left}

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts in place of an MLP."""
        number = layer + 1
        return self.num_experts > 0 and number > self.first_dense_layers and number % self.moe_every == 0

    @property
    def expert_size(self) -> int:
        """The width of an expert."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    def simplest(self) -> "ModelTable":
        """Return the same model in the one spelling by which two are compared.

        The width of an MLP is that of an expert where no layer has an MLP. Of layers 4, 6, ... `first_dense_layers` is
        2, which may have been 3.
        """
        every = self.moe_every
        dense = self.first_dense_layers // every * every
        if not self.num_experts or dense + every > self.num_layers:
            defaults: dict[str, Any] = {
                field.name: field.default for field in fields(self) if field.name in EXPERT_KEYS
            }
            return replace(self, **defaults)
        ffn = self.ffn_hidden_size if dense + every > 1 else self.expert_size
        size = 0 if ffn == self.expert_size else self.expert_size
        return replace(self, ffn_hidden_size=ffn, expert_ffn_hidden_size=size, first_dense_layers=dense)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of the run and its place in a folder, where its name is `foreign`.

    If `is_transposed` the folder has it with its dims in the other order. `first` is where its first dim begins in a
    tensor there that holds several of the run's one after the other, as q, k and v. With an `expert` the tensor there
    is that one of the run's first dim. If `num_stacked` that tensor holds as many of the run's, expert by expert: gate
    [8, 48, 32] and up are [8, 96, 32] there, where up of expert 3 is number 7 of parts of 48 rows, its `first`.
    """

    name: str
    foreign: str
    shape: tuple[int, ...]
    placement: Placement
    is_transposed: bool = False
    first: int = 0
    expert: int | None = None
    num_stacked: int = 0

    @property
    def box(self) -> Box:
        """What of the run's tensor it is."""
        if self.expert is None:
            return Box.whole(self.shape)
        return Box((self.expert, *(0 for _ in self.shape[1:])), (1, *self.shape[1:]))

    @property
    def foreign_shape(self) -> tuple[int, ...]:
        """The shape of the folder's tensor, if this is the last of the run's that it holds."""
        if self.num_stacked:
            return self.shape[0], self.num_stacked * self.shape[1], *self.shape[2:]
        if self.expert is not None:
            return self.shape[1:]
        if self.is_transposed:
            return self.shape[1], self.first + self.shape[0]
        return (self.first + self.shape[0], *self.shape[1:])


def parameters(model: ModelTable) -> Iterator[tuple[str, tuple[int, ...], Placement]]:
    """Yield name, shape and placement of every parameter as the trainer has them, in order of depth."""
    hidden, vocab = model.hidden_size, model.vocab_size
    rows = (Cut(0),)
    yield "embed.weight", (vocab, hidden), Placement("first", rows, round_to=ROUND_VOCAB_TO)
    if model.position == "learned":
        yield "pos.weight", (model.num_positions, hidden), Placement("first")
    for layer in range(model.num_layers):
        for name, shape, placement in _layer(model, layer):
            yield f"layers.{layer}.{name}", shape, placement
    yield from _norm(model, "norm", hidden, Placement("last"))
    tied_to = "embed.weight" if model.tie_embeddings else None
    yield "head.weight", (vocab, hidden), Placement("last", rows, round_to=ROUND_VOCAB_TO, tied_to=tied_to)


def _layer(model: ModelTable, layer: int) -> Iterator[tuple[str, tuple[int, ...], Placement]]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    q_size, kv_size = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    whole, column, row = Placement(layer), Placement(layer, (Cut(0),)), Placement(layer, (Cut(1),))
    kv_heads = Placement(layer, (Cut(0, max_parts=model.num_kv_heads),))
    if model.norms != "after":
        yield from _norm(model, "norm1", hidden, whole)
    for name, size, placement in (("q", q_size, column), ("k", kv_size, kv_heads), ("v", kv_size, kv_heads)):
        yield f"attn.{name}.weight", (size, hidden), placement
        if model.bias or model.qkv_bias or model.attention_bias:
            yield f"attn.{name}.bias", (size,), placement
        if model.wide_qk_norm and name != "v":
            yield from _norm(model, f"attn.{name}_norm", size, placement)
    for name in ("attn.q_norm", "attn.k_norm") if model.qk_norm else ():
        yield from _norm(model, name, model.head_size, whole)
    for name in ("norm2",) * (model.norms != "after") + ("post_norm1", "post_norm2") * (model.norms != "before"):
        yield from _norm(model, name, hidden, whole)
    linears = [("attn.out", (hidden, q_size), row, whole)]
    if model.has_experts(layer):
        yield "attn.out.weight", (hidden, q_size), row
        yield "mlp.router.weight", (model.num_experts, hidden), whole
        wide, narrow = (model.expert_size, hidden), (hidden, model.expert_size)
        for name, shape, dim in (("gate", wide, 1), ("up", wide, 1), ("down", narrow, 2)):
            cuts = (Cut(0, "ep"), Cut(dim))
            yield f"mlp.experts.{name}.weight", (model.num_experts, *shape), Placement(layer, cuts)
        return
    linears += [("mlp.gate", (ffn, hidden), column, column)] * (model.activation == "swiglu")
    linears += [("mlp.up", (ffn, hidden), column, column), ("mlp.down", (hidden, ffn), row, whole)]
    for name, shape, weight, bias in linears:
        yield f"{name}.weight", shape, weight
        if model.bias or (model.attention_bias if name == "attn.out" else model.mlp_bias):
            yield f"{name}.bias", shape[:1], bias


def _norm(
    model: ModelTable, name: str, size: int, placement: Placement
) -> Iterator[tuple[str, tuple[int, ...], Placement]]:
    yield f"{name}.weight", (size,), placement
    if model.norm == "layernorm":
        yield f"{name}.bias", (size,), placement
