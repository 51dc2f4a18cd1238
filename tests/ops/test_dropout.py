"""Dropout: the mask is a function of the global place alone."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dropout import dropout, dropout_reference
from trainer.ops.philox import philox4x32

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLACE: dict[str, Any] = {"seed": 7, "step": 3, "layer": 2, "site": 1, "first_sample": 5}
FAR: dict[str, Any] = {
    "seed": 2**63 - 1,
    "step": 2**40 + 3,
    "layer": 2**32 - 1,
    "site": 2**31,
    "first_sample": 2**33 + 7,
    "first_position": 2**32 - 9,
    "first_feature": 2**34 - 4100,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 9, 64), (2, 4, 1024), (2, 3, 4097)], ids=str)
@pytest.mark.parametrize("first_feature", [0, 1, 2, 3, 4, 70])
def test_equals_the_reference_bit_for_bit(
    shape: tuple[int, ...], first_feature: int, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(shape, dtype=dtype)
    before = native.csrc_calls().get("dropout", 0)
    p = 1 / 3  # scales by 1.5: half of the products lie in the middle between two bf16 numbers
    for place in (PLACE | {"first_feature": first_feature}, FAR):
        got = dropout(x.to(device), p, **place)
        assert torch.equal(got.cpu(), dropout_reference(x, p, **place))
    assert native.csrc_calls()["dropout"] == before + 2


def test_the_masks_of_this_version(device: str) -> None:
    """A resumed run must go on with the masks it began with: a change of these is a change of the format."""
    kept = dropout(torch.ones(2, 2, 12, device=device), 0.5, **PLACE, first_position=3, first_feature=2).bool()
    pattern = ["".join("x" if one else "." for one in row) for row in kept.flatten(0, 1).tolist()]
    assert pattern == PATTERN


PATTERN = ["......x.xx.x", "xx....x.x..x", ".x..x.....x.", ".xxx..xx.xxx"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_at_the_threshold_is_kept(dtype: torch.dtype, device: str) -> None:
    key = philox4x32([PLACE["step"], 0, PLACE["layer"], PLACE["site"]], PLACE["seed"], 0)[:2]
    for feature, word in enumerate(philox4x32([0, 0, PLACE["first_sample"], 0], *key)):
        x = torch.ones(1, 1, 4, dtype=dtype, device=device)
        assert dropout(x, word / 2**32, **PLACE)[0, 0, feature] != 0
        assert dropout(x, (word + 1) / 2**32, **PLACE)[0, 0, feature] == 0


@given(data=st.data())
def test_any_cut_gives_the_same_mask(data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, 9), label="B"), data.draw(st.integers(1, 9), label="S")]
    shape.append(data.draw(st.integers(1, 150), label="D"))
    x = torch.ones(shape)
    whole = dropout(x, 0.4, **PLACE, first_position=11, first_feature=6)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
    box = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
    place = PLACE | {"first_sample": PLACE["first_sample"] + starts[0]}
    part = dropout(x[box], 0.4, **place, first_position=11 + starts[1], first_feature=6 + starts[2])
    assert torch.equal(part, whole[box])


@pytest.mark.parametrize("changed", ["seed", "step", "layer", "site", "first_sample", "first_position"])
def test_each_number_changes_the_mask(changed: str) -> None:
    x = torch.ones(1, 1, 4096)
    place = PLACE | {"first_position": 0}
    first = dropout(x, 0.5, **place).bool()
    other = dropout(x, 0.5, **place | {changed: place[changed] + 1}).bool()
    assert abs((first ^ other).sum() - 2048) < 200  # half of them: 6 standard deviations


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
def test_the_share_of_dropped_elements(p: float, device: str) -> None:
    x = torch.ones(16, 64, 1024, device=device)
    y = dropout(x, p, **PLACE)
    dropped = float((y == 0).double().mean())
    assert abs(dropped - p) < 6 * math.sqrt(p * (1 - p) / x.numel())
    assert y[y != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_makes_the_same_mask(dtype: torch.dtype, device: str) -> None:
    # no zeros: a bf16 randn has some
    x = (torch.rand(3, 5, 77, device=device) + 1).to(dtype).requires_grad_()
    dy = (torch.rand(3, 5, 77, device=device) + 1).to(dtype)
    y = dropout(x, 0.25, **FAR)
    y.backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad, dropout(dy, 0.25, **FAR))
    assert torch.equal(x.grad == 0, y == 0)


def test_gradients_by_finite_differences(device: str) -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, **PLACE), (x,))
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, 0.4, **PLACE), (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_threads_or_the_instruction_set(dtype: torch.dtype, every_simd: list[int]) -> None:
    x = torch.randn(7, 60, 1001).to(dtype)
    torch.set_num_threads(1)
    want = dropout(x, 0.1, **PLACE)
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(dropout(x, 0.1, **PLACE), want)


def test_what_is_dropped_is_zero_whatever_it_was(device: str) -> None:
    x = torch.full((1, 4, 256), float("nan"), device=device)
    y = dropout(x, 0.5, **PLACE)
    zeros = y == 0
    assert torch.equal(zeros, dropout(torch.ones_like(x), 0.5, **PLACE) == 0)
    assert y[~zeros].isnan().all()
    minus = dropout(-torch.ones_like(x), 0.5, **PLACE)
    assert not minus[zeros].signbit().any()


def test_no_probability_is_no_operation() -> None:
    x = torch.randn(1, 2, 3)
    assert dropout(x, 0.0, **PLACE) is x


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    assert dropout(torch.empty(shape, device=device), 0.5, **PLACE).shape == shape


def test_strided_inputs(device: str) -> None:
    x = torch.randn(4, 6, 10, device=device)
    assert torch.equal(dropout(x.mT.contiguous().mT, 0.5, **PLACE), dropout(x, 0.5, **PLACE))
    shifted = torch.randn(4 * 6 * 16 + 1, device=device)[1:].view(4, 6, 16)
    assert torch.equal(dropout(shifted, 0.5, **PLACE), dropout(shifted.clone(), 0.5, **PLACE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.0}, r"probability is 1.0, not in \[0, 1\)"),
        ({"p": -0.1}, "probability is -0.1"),
        ({"p": float("nan")}, "probability is nan"),
        ({"x": torch.ones(2, 3)}, r"x is \[batch, positions, features\], not \[2, 3\]"),
        ({"x": torch.ones(1, 1, 4, dtype=torch.int32)}, "not torch.int32"),
        ({"seed": -1}, "seed is -1"),
        ({"layer": 2**32}, "layer is 4294967296"),
        ({"first_sample": -1}, "first_sample is -1"),
        ({"first_position": 2**32 - 1}, "first_position is 4294967295 for 2 of them"),
        ({"first_feature": 2**34 - 3}, "first_feature is 17179869181 for 4 of them"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.ones(1, 2, 4), "p": 0.5, **PLACE} | change
    for form in (dropout, dropout_reference):
        if "int32" in message and form is dropout_reference:
            continue
        with pytest.raises(UserError, match=message):
            form(**arguments)
