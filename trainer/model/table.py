"""The table of parameters: name, global shape, placement and initial values of each, without building a model.

A checkpoint's table and each rank's own part of the model both come from it. Names are the checkpoint's; which of them
are one matrix for the arithmetic is said here too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

from ckptkit import Coords, Cut, ParallelLayout, Placement
from threefold.errors import UserError
from trainer.config import Config, ModelConfig
from trainer.config.optim import GroupConfig
from trainer.config.resolve import cuts_tokens, has_experts
from trainer.mesh.layout import holders
from trainer.model.stages import is_on_rank, stage_ranges
from trainer.store.parameter import Parameter
from trainer.store.plan import ParameterRun, plan_runs


def parameter_table(config: Config) -> dict[str, Parameter]:
    """Return every parameter of the model in order of depth.

    A tied head has a row with `tied_to` and no values of its own.
    """
    table = _rows(config.model, config.train.seq_length, is_partial=cuts_tokens(config))
    grouped, name = with_groups(table, config.optim.groups), config.optim.name
    if name == "adamw":
        return grouped
    return {key: replace(row, optimizer=_optimizer(name, key, row)) for key, row in grouped.items()}


def _optimizer(chosen: str, name: str, row: Parameter) -> str:
    """Return the optimizer of a row: Muon is for the matrices of layers but their routers, AdamW for the rest."""
    is_matrix = name.startswith("layers.") and len(row.shape) > 1 and not name.endswith(".router.weight")
    return chosen if chosen != "muon" or is_matrix else "adamw"


def with_groups(table: Mapping[str, Parameter], groups: Sequence[GroupConfig]) -> dict[str, Parameter]:
    """Return a table whose rows have the factors of the first group that fits them; UserError if one fits no row.

    For example "*.norm?.weight" fits layers.0.norm1.weight, and "head.weight" no row of its own if it is tied.
    """
    fitted: set[str] = set()
    rows = dict(table)
    for number, group in enumerate(groups):
        fitting = {
            name for name, row in table.items() if not row.placement.tied_to and fnmatchcase(name, group.pattern)
        }
        place = f"optim.groups[{number}].pattern {group.pattern!r}"
        if not fitting:
            near = get_close_matches(group.pattern, table, 1, 0) or list(table)[:1]
            raise UserError(f"{place} fits no parameter; the names are such as {near[0]}")
        if fitting <= fitted:
            raise UserError(f"{place} fits only what groups before it have taken, such as {min(fitting)}")
        for name in fitting - fitted:
            decay = table[name].decay if group.decay_factor is None else group.decay_factor
            rows[name] = replace(table[name], rate=group.lr_factor, decay=decay)
        fitted |= fitting
    return rows


@lru_cache(maxsize=16)  # plans ask for those of one model again and again
def _rows(model: ModelConfig, seq_length: int, *, is_partial: bool) -> Mapping[str, Parameter]:
    """Return the rows without groups; partial if each tensor-parallel rank has the part of its tokens."""
    hidden, vocab = model.hidden_size, model.vocab_size
    rows, round_to = (Cut(0),), model.round_vocab_to
    embed = Parameter((vocab, hidden), Placement("first", rows, round_to=round_to), model.init_std, decay=1.0)
    table = {"embed.weight": embed}
    if model.position == "learned":
        table["pos.weight"] = Parameter(
            (model.num_positions or seq_length, hidden), Placement("first"), model.init_std, decay=1.0
        )
    for layer in range(model.num_layers):
        table |= {f"layers.{layer}.{name}": row for name, row in _layer_rows(model, layer).items()}
    table |= _norm_rows(model, "norm", hidden, Placement("last"))
    tied_to = "embed.weight" if model.tie_embeddings else None
    table["head.weight"] = Parameter(
        (vocab, hidden), Placement("last", rows, round_to=round_to, tied_to=tied_to), model.init_std, decay=1.0
    )
    return {name: replace(row, is_partial=True) for name, row in table.items()} if is_partial else table


def _layer_rows(model: ModelConfig, layer: int) -> dict[str, Parameter]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    head = model.head_size
    q, kv = model.num_heads * head, model.num_kv_heads * head
    whole, column, row = Placement(layer), Placement(layer, (Cut(0),)), Placement(layer, (Cut(1),))
    kv_heads = Placement(layer, (Cut(0, max_parts=model.num_kv_heads),))
    std = model.init_std
    std_out = std / math.sqrt(2 * model.num_layers)  # of what adds to the residual stream (GPT-2)
    attention = {"attn.q": (q, column), "attn.k": (kv, kv_heads), "attn.v": (kv, kv_heads)}
    rows = _norm_rows(model, "norm1", hidden, whole)
    for name, (size, cut) in attention.items():
        rows |= _linear_rows(model, name, (size, hidden), cut, cut, std)
        if model.qkv_bias:
            rows[f"{name}.bias"] = Parameter((size,), cut, 0.0)
    if model.qk_norm:
        for name in ("attn.q_norm", "attn.k_norm"):
            norm = _norm_rows(model, name, head, whole)
            rows |= {key: replace(each, is_partial=True) for key, each in norm.items()}
    rows |= _linear_rows(model, "attn.out", (hidden, q), row, whole, std_out)
    rows |= _norm_rows(model, "norm2", hidden, whole)
    if has_experts(model, layer):
        return rows | _expert_rows(model, layer, std, std_out)
    return rows | _mlp_rows(model, "mlp", layer, ffn, std, std_out)


def _expert_rows(model: ModelConfig, layer: int, std: float, std_out: float) -> dict[str, Parameter]:
    """Return the router, the experts one below the other, which ep cuts by number and tp as an MLP, and shared ones."""
    num_experts, hidden, ffn = model.num_experts, model.hidden_size, model.expert_ffn_hidden_size
    rows = {"mlp.router.weight": Parameter((num_experts, hidden), Placement(layer), std, decay=1.0)}
    for name, shape, dim, deviation in (
        ("gate", (ffn, hidden), 1, std),
        ("up", (ffn, hidden), 1, std),
        ("down", (hidden, ffn), 2, std_out),
    ):
        placement = Placement(layer, (Cut(0, "ep"), Cut(dim)))
        rows[f"mlp.experts.{name}.weight"] = Parameter((num_experts, *shape), placement, deviation, decay=1.0)
    if model.num_shared_experts:
        rows |= _mlp_rows(model, "mlp.shared", layer, model.num_shared_experts * ffn, std, std_out)
    return rows


def _mlp_rows(model: ModelConfig, name: str, layer: int, ffn: int, std: float, std_out: float) -> dict[str, Parameter]:
    hidden, whole = model.hidden_size, Placement(layer)
    column, row = (Placement(layer, (Cut(dim),)) for dim in (0, 1))
    rows = dict[str, Parameter]()
    for part in ("gate", "up") if model.activation == "swiglu" else ("up",):
        rows |= _linear_rows(model, f"{name}.{part}", (ffn, hidden), column, column, std)
    return rows | _linear_rows(model, f"{name}.down", (hidden, ffn), row, whole, std_out)


def _linear_rows(
    model: ModelConfig, name: str, shape: tuple[int, int], weight: Placement, bias: Placement, std: float
) -> dict[str, Parameter]:
    rows = {f"{name}.weight": Parameter(shape, weight, std, decay=1.0)}
    if model.bias:
        rows[f"{name}.bias"] = Parameter(shape[:1], bias, 0.0)
    return rows


def _norm_rows(model: ModelConfig, name: str, size: int, placement: Placement) -> dict[str, Parameter]:
    rows = {f"{name}.weight": Parameter((size,), placement, None)}
    if model.norm == "layernorm":
        rows[f"{name}.bias"] = Parameter((size,), placement, 0.0)
    return rows


def local_runs(
    config: Config, table: dict[str, Parameter], layout: ParallelLayout, coords: Coords
) -> list[ParameterRun]:
    """Return what the rank at `coords` holds, q|k|v and gate|up as one run each.

    A tied head is the embedding's matrix, which both the first and the last stage hold.
    """
    num_layers = config.model.num_layers
    ranges = stage_ranges(config, table, layout.num_stages)
    local: dict[str, Parameter] = {}
    for name, row in table.items():
        if is_on_rank(row.placement, ranges, layout, coords.pp):
            owner = row.placement.tied_to or name
            local[owner] = table[owner]
    shapes = {name: row.placement.live_shape(name, row.shape, layout) for name, row in local.items()}
    tied = {row.placement.tied_to for row in table.values()}
    held = {name: holders(row.placement, layout, is_tied=name in tied) for name, row in local.items()}
    units = {name: _unit(name) for name in local}
    fused = [names for layer in range(num_layers) for names in fused_names(config.model, layout, f"layers.{layer}")]
    runs = plan_runs(shapes, [names for names in fused if names[0] in local], units, held)
    kinds = [{local[name].optimizer for name in run.names} for run in runs]
    assert all(len(kind) == 1 for kind in kinds), "what is one matrix for the arithmetic has one optimizer"
    return [replace(run, optimizer=kind.pop()) for run, kind in zip(runs, kinds, strict=True)]


def _unit(name: str) -> str:
    """Return the unit of a parameter: a layer, or what is before or behind the layers, each with passes of its own."""
    first, second, *_ = name.split(".")
    return f"layers.{second}" if first == "layers" else first


def fused_names(model: ModelConfig, layout: ParallelLayout, prefix: str) -> Iterator[tuple[str, ...]]:
    """Yield the parameters of a layer that are one matrix for the arithmetic: they need equal holders."""
    attention = [("q", "k", "v")] if layout.tp <= model.num_kv_heads else [("k", "v")]
    mlps = ((part, [("gate", "up")]) for part in ("mlp", "mlp.experts", "mlp.shared"))
    for part, groups in (("attn", attention), *mlps):
        for names in groups:
            for kind in ("weight", "bias"):
                yield tuple(f"{prefix}.{part}.{name}.{kind}" for name in names)
