"""Attention of rows that are cut over ranks is that of whole rows, and all ranks call their groups in one order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.weights import CPU
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.attention.choose import backend_named
from trainer.ops.attention.seam import Mask, attention
from trainer.parallel.context import ContextParallel, copy_in_words, half_mask
from trainer.parallel.places import share_of
from trainer.verify.recording import Call, recording_of
from trainer.verify.threads import run_threads

NUM_TOKENS, LENGTH, HEAD_SIZE = 24, 12, 4
BOUNDS = torch.tensor([0, 5, 6, 6, 19, 24], dtype=torch.int32)  # no part of the tokens begins with a document
MASKS = {
    "rows": Mask.of_rows(12),
    "documents": Mask.of_documents(BOUNDS, 13),
    "window": replace(Mask.of_documents(BOUNDS, 13), window=3),
}
Documents = tuple[torch.Tensor, int] | None
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
    out = ContextParallel(group).attend(*heads, [mask], LENGTH, backend_named(backend), None)
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


def gathering(rank: int, cp: int, whole: Parts, documents: Documents, window: int | None, *, network: Network) -> Parts:
    """Result and gradients of one rank's tokens, in the order of rows with those of others' tokens NaN."""
    group = ProcessMesh(ParallelLayout(cp=cp), rank, CPU, timeout_s=60, network=network).cp
    context = ContextParallel(group, gathers_keys=True)
    own = torch.cat([torch.arange(run.start, run.stop) for run in context.own_runs(range(NUM_TOKENS), LENGTH)])
    masks = [replace(mask, window=window) for mask in context.halves(own, documents, LENGTH)]
    heads = [x[own].requires_grad_() for x in whole[:3]]
    out = context.attend(*heads, masks, LENGTH, backend_named("reference"), None)
    torch.autograd.backward(out, whole[3][own])
    found = []
    for x in (out.detach(), *(x.grad for x in heads if x.grad is not None)):
        found.append(torch.full((NUM_TOKENS, *x.shape[1:]), torch.nan, dtype=x.dtype))
        found[-1][own] = x
    return found


@pytest.mark.parametrize("documents", [None, (BOUNDS, 13)], ids=["rows", "documents"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("cp", "num_kv_heads"), [(2, 4), (3, 1), (2, 1)])
def test_gathered_keys_are_seen_as_in_whole_rows(
    cp: int, num_kv_heads: int, window: int | None, documents: Documents
) -> None:
    """Two rows, in whose middle documents begin; the last one is of one rank's chunk."""
    bounds = torch.tensor([0, 5, 6, 12, 19, 24], dtype=torch.int32)
    documents = documents and (bounds, 7)
    mask = replace(Mask.of_rows(LENGTH) if documents is None else Mask.of_documents(*documents), window=window)
    whole = values(4, num_kv_heads, torch.float64)
    heads = [x.clone().requires_grad_() for x in whole[:3]]
    out = attention(*heads, mask, backend_named("reference"))
    torch.autograd.backward(out, whole[3])
    found = zip(*run_threads(cp, gathering, cp, whole, documents, window), strict=True)
    for parts, expected in zip(found, (out, *(x.grad for x in heads)), strict=True):
        joined = torch.stack(parts)
        assert (joined.isnan().sum(0) == cp - 1).all()
        torch.testing.assert_close(joined.nansum(0), expected, rtol=0, atol=1e-12)


def test_the_halves_of_a_rank_see_documents_up_to_their_ends() -> None:
    mask = half_mask(torch.tensor([0, 3, 8], dtype=torch.int32), 5, 8, 8, range(4, 6))
    assert mask.cu_k is not None
    assert mask.cu_q is not None
    assert (mask.cu_k.tolist(), mask.cu_q.tolist(), mask.max_q, mask.max_k) == ([0, 3, 6, 8], [0, 0, 2, 2], 2, 5)


def calls(rank: int, config: Config, *, network: Network) -> list[Call]:
    """What a rank calls of its groups in two steps."""
    engine = make_engine(rank, config, network=network)
    for step in range(2):
        engine.train_step(step, local_batch(config, step, engine.mesh))
    return recording_of(engine.mesh).calls


@pytest.mark.parametrize(
    ("layout", "schedule", "method"),
    [
        ("cp2-dp2", "1f1b", "ulysses"),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.ci])
            for case in (
                ("tp2-cp2-pp2", "zb-h1", "ulysses"),
                ("cp4-pp2-virtual2", "1f1b", "allgather"),
                ("cp2-dp2-pp2", "gpipe", "allgather"),
            )
        ),
    ],
)
def test_all_ranks_of_a_group_call_it_in_one_order(layout: str, schedule: Any, method: Any) -> None:
    """And those of a rank's groups with each other: ranks of one pipeline rank make the same calls altogether."""
    config = small(config_for("llama", ParallelLayout.parse(layout), zero_stage=3))
    config = replace(config, parallel=replace(config.parallel, schedule=schedule, cp_method=method, zero_whole_kib=0))
    config = replace(config, model=replace(config.model, num_layers=4))
    sizes = layout_of(config)
    made = run_threads(sizes.world_size, calls, config)
    for pp in range(sizes.pp):
        first, *others = (made[rank] for rank in range(sizes.world_size) if sizes.coords(rank).pp == pp)
        for other in others:
            require_equal([call[:2] for call in other] == [call[:2] for call in first], f"stage {pp}")
    kinds = {call.kind for call in made[0] if call.group == "cp"}
    assert kinds == ({"all_gather", "reduce_scatter"} if config.parallel.cp_method == "allgather" else {"all_to_all"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [slice(0, 8), slice(8, 16), slice(1, 9), slice(0, 7)], ids=str)
@pytest.mark.parametrize("begin", [0, 1])
def test_copies_are_whole_whatever_words_are(dtype: torch.dtype, columns: slice, begin: int) -> None:
    x_NTH = torch.arange(3 * 4 * 24).to(dtype).view(3, 4, 24)[:, :, columns].transpose(0, 1)
    to_NTH = torch.zeros(x_NTH.numel() + 1, dtype=dtype)[begin : begin + x_NTH.numel()].view(x_NTH.shape)
    copy_in_words(to_NTH, x_NTH)
    assert torch.equal(to_NTH, x_NTH)
