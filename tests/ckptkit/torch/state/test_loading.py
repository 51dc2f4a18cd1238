"""Loads of many tensors: what they have in common is found out once, and the odd one among them is named."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckptkit.torch import Run
from ckptkit.torch.state import boxes
from threefold.errors import UserError


def freed() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(2, 3, device="meta"), "a meta tensor"),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), "layout torch.sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "a nested tensor"),
    "negative": (lambda: torch._neg_view(torch.ones(2, 3)), "the negative bit"),
    "freed": (freed, "whose storage was freed"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "a quantized tensor"),
    "conjugate": (lambda: torch.ones(2, 3, dtype=torch.complex64).conj(), "the conjugate bit"),
    "expanded": (lambda: torch.ones(1, 3).expand(2, 3), "share memory"),
    "other dtype": (lambda: torch.ones(2, 3).half(), r"float32 \[2, 3\] in the checkpoint, float16 \[2, 3\] here"),
    "other shape": (lambda: torch.ones(3, 2), r"float32 \[2, 3\] in the checkpoint, float32 \[3, 2\] here"),
}


def many() -> dict[str, torch.Tensor]:
    return {f"layer.{number}/w%": torch.full((2, 3), float(number)) for number in range(40)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("runs") / "run"
    with Run(place) as run:
        run.save(1, {"state": many()})
    return Run(place)


def test_plain_tensors_are_not_looked_at_one_by_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, state = list[object](), {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in many().items()}
    monkeypatch.setattr(boxes, "no_memory", looks.append)
    run.load({"state": state})
    assert looks == []
    assert all(torch.equal(tensor, state[name]) for name, tensor in many().items())


@pytest.mark.filterwarnings("ignore")  # of torch, about kinds that it is about to give up
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_tensor_among_many_is_named(run: Run, kind: str) -> None:
    make, fault = ODD[kind]
    state = many() | {"layer.7/w%": make()}
    before = {name: tensor.clone() for name, tensor in state.items() if name != "layer.7/w%"}
    with pytest.raises(UserError, match=rf"state/layer\.7%2Fw%25.*{fault}"):
        run.load({"state": state})
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.items()), "nothing was filled"
