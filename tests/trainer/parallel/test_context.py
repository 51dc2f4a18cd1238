"""Attention of rows that are cut over ranks is that of whole rows, and all ranks call their groups in one order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.recording import Call, recording_of
from tests.trainer.support.threads import run_threads
from tests.trainer.support.weights import CPU
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.attention.choose import backend_named
from trainer.ops.attention.seam import Mask, attention
from trainer.parallel.context import ContextParallel
from trainer.parallel.places import share_of

NUM_TOKENS, HEAD_SIZE = 24, 4
BOUNDS = torch.tensor([0, 5, 6, 6, 19, 24], dtype=torch.int32)  # no part of the tokens begins with a document
MASKS = {
    "rows": Mask.of_rows(12),
    "documents": Mask.of_documents(BOUNDS, 13),
    "window": replace(Mask.of_documents(BOUNDS, 13), window=3),
}
Parts = list[torch.Tensor]  # q, k, v and the gradient of the result


def values(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Parts:
    generator = torch.Generator().manual_seed(num_heads + num_kv_heads)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [
        torch.randn(NUM_TOKENS, count, HEAD_SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for count in counts
    ]


def cut(rank: int, cp: int, whole: Parts, mask: Mask, backend: str, *, network: Network) -> Parts:
    """Result and gradients of one rank's tokens."""
    group = ProcessMesh(ParallelLayout(cp=cp), rank, CPU, timeout_s=60, network=network).cp
    [own] = share_of((range(NUM_TOKENS),), rank, cp)
    q, k, v, dout = (x[own.start : own.stop] for x in whole)
    heads = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ContextParallel(group).attend(*heads, mask, backend_named(backend), None)
    torch.autograd.backward(out, dout)
    return [out.detach(), *(x.grad for x in heads if x.grad is not None)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("cp", "num_kv_heads", "backend"),
    [(2, 4, "reference"), (4, 4, "sdpa-cpu"), (3, 6, "reference"), (2, 1, "reference"), (4, 2, "sdpa-cpu")],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_attention_has_the_bits_of_whole_rows(
    dtype: torch.dtype, cp: int, num_kv_heads: int, backend: str, mask: str
) -> None:
    """Near where several ranks have the same key-value head: its products are of fewer queries, and added."""
    if backend == "sdpa-cpu" and mask == "window":
        backend = "reference"
    whole = values(12, num_kv_heads, dtype)
    heads = [x.clone().requires_grad_() for x in whole[:3]]
    out = attention(*heads, MASKS[mask], backend_named(backend))
    torch.autograd.backward(out, whole[3])
    found = zip(*run_threads(cp, cut, cp, whole, MASKS[mask], backend), strict=True)
    for name, parts, expected in zip(("out", "q", "k", "v"), found, (out, *(x.grad for x in heads)), strict=True):
        assert expected is not None
        if cp > num_kv_heads:
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-12 if dtype.itemsize == 8 else 0.2)
        else:
            assert torch.equal(torch.cat(parts), expected), name


def calls(rank: int, config: Config, *, network: Network) -> list[Call]:
    """What a rank calls of its groups in two steps."""
    engine = make_engine(rank, config, network=network)
    for step in range(2):
        engine.train_step(step, local_batch(config, step, engine.mesh))
    return recording_of(engine.mesh).calls


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("cp2-dp2", "1f1b"),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.ci])
            for case in (("tp2-cp2-pp2", "zb-h1"), ("cp4-pp2-virtual2", "1f1b"), ("cp2-dp2-pp2", "gpipe"))
        ),
    ],
)
def test_all_ranks_of_a_group_call_it_in_one_order(layout: str, schedule: Any) -> None:
    """And those of a rank's groups with each other: ranks of one pipeline rank make the same calls altogether."""
    config = small(config_for("llama", ParallelLayout.parse(layout), zero_stage=3))
    config = replace(config, parallel=replace(config.parallel, schedule=schedule, zero_whole_kib=0))
    config = replace(config, model=replace(config.model, num_layers=4))
    sizes = layout_of(config)
    made = run_threads(sizes.world_size, calls, config)
    for pp in range(sizes.pp):
        first, *others = (made[rank] for rank in range(sizes.world_size) if sizes.coords(rank).pp == pp)
        for other in others:
            require_equal([call[:2] for call in other] == [call[:2] for call in first], f"stage {pp}")
    kinds = {(call.kind, call.group) for call in made[0]}
    assert ("all_to_all", "cp") in kinds
    assert not any(group == "cp" for kind, group in kinds if kind != "all_to_all")
