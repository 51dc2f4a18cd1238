"""Tensors whose elements do not lie in memory as they are: refused with the way out, on save and restore alike."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Box, ParallelLayout, Piece, Placement, TensorInfo
from ckptkit.io.torch_tensors import are_in_memory, no_memory
from threefold.errors import UserError

torch = pytest.importorskip("torch")
INFO = TensorInfo("w", "F32", (4,), Placement(0))
COMMON: dict[str, Any] = {"tensors": [INFO], "layout": ParallelLayout(), "num_layers": 1, "metadata": {}}


class Wrapper(torch.Tensor):
    """As of torchao or TransformerEngine: a shape and a dtype, the elements are in another tensor."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def d_tensor() -> Any:
    """Made without a process group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)


def fake() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4)


def freed() -> Any:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)


KINDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "d_tensor": (d_tensor, "a DTensor, of which each rank holds a part", "pass tensor.to_local(), with the box"),
    "meta": (lambda: torch.zeros(4, device="meta"), "a meta tensor", 'module.to_empty(device="cpu")'),
    "fake": (fake, "a FakeTensor, which has no memory", "outside of FakeTensorMode"),
    "wrapper": (lambda: Wrapper(torch.zeros(4)), "a Wrapper, which wraps", "pass the torch.Tensor that holds"),
    "sparse": (lambda: torch.zeros(4).to_sparse(), "a tensor of layout torch.sparse_coo", "pass tensor.to_dense()"),
    "quantized": (quantized, "a quantized tensor of torch.quint8", "pass tensor.int_repr()"),
    "negative": (lambda: torch._neg_view(torch.ones(4)), "the negative bit", "pass tensor.resolve_neg()"),
    "conjugate": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "the conjugate bit", "tensor.resolve_conj()"),
    "freed": (freed, "a tensor whose storage was freed", "allocate"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_memory_of_its_own_is_refused_with_the_way_out(kind: str, tmp_path: Path) -> None:
    make, what, hint = KINDS[kind]
    pieces = [Piece("w", Box((0,), (4,)), 0, 4, make())]
    given: list[Callable[[], Any]] = [lambda: ckptkit.save(str(tmp_path), 2, pieces, **COMMON)]
    ckptkit.save(str(tmp_path), 1, [Piece("w", Box((0,), (4,)), 0, 4, np.ones(4, np.float32))], **COMMON)
    given.append(lambda: ckptkit.restore(str(tmp_path), 1, pieces))
    for call in given:
        with pytest.raises(UserError) as caught:
            call()
        assert "w: F32, and a piece is" in caught.value.message
        assert what in caught.value.message
        assert hint in (caught.value.hint or "")


def test_a_checkpointer_refuses_them_when_it_is_prepared(tmp_path: Path) -> None:
    pieces = [Piece("w", Box((0,), (4,)), 0, 4, torch.zeros(4, device="meta"))]
    with ckptkit.Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        with pytest.raises(UserError, match="a meta tensor, which has no memory"):
            checkpointer.prepare(pieces, [INFO])
        with pytest.raises(UserError, match="a meta tensor, which has no memory"):
            checkpointer.save(1, pieces, **COMMON)


def test_ordinary_tensors_and_their_plain_subclasses_are_taken() -> None:
    class Marked(torch.nn.Parameter):
        """As those that name how a parameter is cut."""

    ordinary = [
        np.zeros(4), torch.zeros(4), torch.nn.Parameter(torch.zeros(4)), Marked(torch.zeros(4)), torch.zeros(0),
        torch.zeros(8)[4:], torch.zeros(()),
    ]  # fmt: skip
    assert [no_memory(data) for data in ordinary] == [None] * len(ordinary)
    assert are_in_memory(ordinary)
