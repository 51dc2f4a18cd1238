"""Products beside the transfers of cut tokens: the same rows, in parts, and what is begun before what."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.ranks import run_ranks
from tests.trainer.support.weights import CPU, group, handle
from trainer.linear.linear import linear
from trainer.linear.overlapped import TokenCut, parts_of
from trainer.mesh.group import Group, Network
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.activation import SWIGLU
from trainer.verify.threads import run_threads

HIDDEN, INNER = 5, 4


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tp_group(rank: int, size: int, network: Network | None) -> Group:
    return ProcessMesh(ParallelLayout(tp=size), rank, CPU, timeout_s=60, network=network).tp


def one_mlp(rank: int, size: int, num_rows: int, num_parts: int, *, network: Network | None = None) -> list[Any]:
    """Output and gradients of a rank's gate and up, and down, whose tokens are cut: `num_rows` on each rank."""
    cut = TokenCut(tp_group(rank, size, network), num_parts)
    handles = [
        handle(values(*shape, seed=10 * rank + seed))
        for seed, shape in enumerate([(2 * INNER, HIDDEN), (2 * INNER,), (HIDDEN, INNER)])
    ]
    up, bias, down = (weight for weight, _ in handles)
    x = values(size * num_rows, HIDDEN, seed=5).chunk(size)[rank].clone().requires_grad_()
    packed = linear(x, up, bias, gather=cut)
    y = linear(packed, down, make_x=SWIGLU, scatter=cut)
    y.backward(values(size * num_rows, HIDDEN, seed=6).chunk(size)[rank].t().contiguous().t())  # its rows not dense
    assert x.grad is not None
    assert y.shape == (num_rows, HIDDEN)
    return [found.numpy() for found in (y.detach(), x.grad, *(gradient for _, gradient in handles))]


@pytest.mark.parametrize(("size", "num_rows"), [(2, 24), (3, 17), (4, 1)])
def test_parts_change_nothing_on_threads(size: int, num_rows: int) -> None:
    """Up to rounding: for a product of fewer rows MKL may have other kernels, on some processors."""
    whole = run_threads(size, one_mlp, size, num_rows, 1)
    for num_parts in (2, 3, 9):
        for rank, found in enumerate(run_threads(size, one_mlp, size, num_rows, num_parts)):
            for ours, expected in zip(found, whole[rank], strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-13)


@pytest.mark.slow
def test_parts_change_nothing_on_two_processes() -> None:
    whole, parts = (run_ranks(2, one_mlp, 2, 25, num_parts) for num_parts in (1, 3))
    for ours, expected in zip([*whole[0], *whole[1]], [*parts[0], *parts[1]], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-13)


@given(num_rows=st.integers(1, 40), num_parts=st.integers(1, 40))
def test_parts_are_all_rows_as_equal_as_can_be(num_rows: int, num_parts: int) -> None:
    parts = parts_of(num_rows, num_parts)
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == min(num_parts, num_rows)
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


class Log:
    """A transport that notes what is begun and waited for; what is not its own rank's stays zero."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor, *, is_async: bool) -> "Waiting":
        return self.begin("gather")

    def reduce_scatter(self, flat: torch.Tensor, share: torch.Tensor, *, is_async: bool) -> "Waiting":
        return self.begin("sum")

    def begin(self, what: str) -> "Waiting":
        number = sum(call.startswith(f"begin {what}") for call in self.calls)
        self.calls.append(f"begin {what} {number}")
        return Waiting(self, f"wait {what} {number}")


class Waiting:
    def __init__(self, log: Log, what: str) -> None:
        self.log, self.what = log, what

    def wait(self) -> None:
        self.log.calls.append(self.what)


def calls_of(num_parts: int, use: Any) -> list[str]:
    log, alone = Log(), group(2, 1)
    cut = TokenCut(Group("tp", alone.ranks, alone.index, alone.clock, log), num_parts)  # type: ignore[arg-type]
    use(cut, lambda rows, out: log.calls.append(f"product of {len(rows)}"))
    return log.calls


def test_all_gathers_begin_first_and_own_rows_are_multiplied_before_any_is_waited_for() -> None:
    own, out = torch.zeros(6, 2), torch.zeros(12, 3)
    calls = calls_of(2, lambda cut, product: cut.multiply_gathered(own, out, product))
    assert calls == ["begin gather 0", "begin gather 1", "product of 6", "wait gather 0", "product of 3",
                     "wait gather 1", "product of 3"]  # fmt: skip
    calls = calls_of(2, lambda cut, product: cut.multiply_and_gather(own, out, product))
    assert calls == ["begin gather 0", "product of 6", "wait gather 0", "product of 6"]
    for name in ("multiply_gathered", "multiply_and_gather"):
        calls = calls_of(1, lambda cut, product, name=name: getattr(cut, name)(own, out, product))
        assert calls == ["begin gather 0", "wait gather 0", "product of 12"]


def test_each_sum_begins_after_its_products_and_is_waited_for_at_the_end() -> None:
    calls = calls_of(2, lambda cut, product: cut.start_sum(torch.zeros(12, 2), 3, product).wait())
    assert calls == ["product of 3", "product of 3", "begin sum 0", "product of 3", "product of 3", "begin sum 1",
                     "wait sum 0", "wait sum 1"]  # fmt: skip
    calls = calls_of(1, lambda cut, product: cut.start_sum(torch.zeros(12, 2), 3, product).wait())
    assert calls == ["product of 12", "begin sum 0", "wait sum 0"]
