"""The parameter table: the names that checkpoints hold, and boxes of initial values that agree between layouts."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import MODELS, config_for, make_engine
from trainer.config import Config
from trainer.mesh.layout import GROUPS
from trainer.model.table import local_runs, parameter_table
from trainer.store.parameter import initial_values

LLAMA_LAYER = {
    "norm1.weight", "attn.q.weight", "attn.k.weight", "attn.v.weight", "attn.q_norm.weight", "attn.k_norm.weight",
    "attn.out.weight", "norm2.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight",
}  # fmt: skip
GPT2_LAYER = {
    f"{name}.{kind}"
    for name in ("norm1", "attn.q", "attn.k", "attn.v", "attn.out", "norm2", "mlp.up", "mlp.down")
    for kind in ("weight", "bias")
}
OTHERS = {
    "llama": {"embed.weight", "norm.weight", "head.weight"},
    "gpt2": {"embed.weight", "pos.weight", "norm.weight", "norm.bias", "head.weight"},
}

CPU = torch.device("cpu")


def small(model: str) -> Config:
    config = config_for(model, ParallelLayout())
    return replace(config, model=replace(config.model, vocab_size=61))


@pytest.mark.parametrize(("model", "layer"), [("llama", LLAMA_LAYER), ("gpt2", GPT2_LAYER)])
def test_names_are_the_checkpoints(model: str, layer: set[str]) -> None:
    table = parameter_table(small(model))
    assert set(table) == OTHERS[model] | {f"layers.{n}.{name}" for n in range(3) for name in layer}
    assert {name for name, row in table.items() if not row.decay} == {
        name for name, row in table.items() if "norm" in name or name.endswith("bias")
    }


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_whole_model_has_the_tables_parameters(model: str) -> None:
    config = small(model)
    table = parameter_table(config)
    live = {name: tuple(value.shape) for name, value in make_engine(0, config).store.values()}
    assert live == {name: row.shape for name, row in table.items() if row.placement.tied_to is None}


def test_each_parameter_belongs_to_the_ranks_that_hold_it() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    table = parameter_table(small("gpt2"))
    runs = {run.names[0]: run for run in local_runs(small("gpt2"), table, layout, layout.coords(0))}
    assert runs["embed.weight"].holders == GROUPS["cp.dp.ends"], "tied: both end stages hold it"
    assert runs["pos.weight"].holders == runs["layers.0.norm1.bias"].holders == GROUPS["tp.cp.dp"]
    assert runs["layers.0.attn.out.bias"].holders == GROUPS["tp.cp.dp"]
    assert runs["layers.0.attn.q.weight"].names == tuple(f"layers.0.attn.{name}.weight" for name in "qkv")
    assert runs["layers.0.attn.q.bias"].shape == (48,)
    last = {run.names[0] for run in local_runs(small("gpt2"), table, layout, layout.coords(7))}
    assert "embed.weight" in last
    assert "head.weight" not in last


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.attn.out.weight", "layers.2.mlp.up.weight", "norm.weight"])
def test_a_rank_makes_its_own_box_of_the_whole(name: str) -> None:
    row = parameter_table(small("llama"))[name]
    alone, cut, dtype = ParallelLayout(), ParallelLayout(tp=2), torch.float64
    whole = initial_values(name, row, row.shape, alone, alone.coords(0), 5, dtype, CPU)
    if row.std is not None:
        assert whole.std().item() == pytest.approx(row.std, rel=0.1)
    for rank in range(2):
        box = row.placement.local_box(name, row.shape, cut, cut.coords(rank))
        slices = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        num_rows = 31 if row.placement.round_to else box.shape[0]
        part = initial_values(
            name, row, (num_rows, *box.shape[1:]), cut, cut.coords(rank), 5, dtype, torch.device("cpu")
        )
        assert torch.equal(part[: box.shape[0]], whole[slices])
        assert not part[box.shape[0] :].any(), "vocabulary padding is zero"
