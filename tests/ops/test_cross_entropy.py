"""Cross-entropy over parts of a vocabulary against float64, and its promises about bits, memory and odd rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.ops import native
from trainer.ops.cross_entropy import VocabularyPart, cross_entropy_reference, row_sums, write_gradient
from trainer.parallel.cross_entropy import factors, losses, vocab_cross_entropy

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# tokens, true columns, padding: no whole pack, a warp's packs, odd ends, all threads several times
SHAPES = [(1, 1, 0), (5, 3, 61), (7, 61, 3), (33, 1000, 24), (4, 4099, 5), (3, 50257, 47), (2, 131072, 0)]
IDS = {"ids": str}
ALONE = Group("test", (0,), 0, Clock(torch.device("cpu")))
POISON = 6e4  # what padding and the room between rows hold


class Case:
    """Logits of one shape somewhere in memory, labels, and the gradients of the losses, some of which are 0."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu", *, shift: int = 0, room: int = 0
    ) -> None:
        num_tokens, self.num_true, padding = shape
        generator = torch.Generator().manual_seed(sum(shape))
        values = 4 * torch.randn(num_tokens, self.num_true, generator=generator, dtype=torch.float64)
        self.memory = torch.full((num_tokens, shift + self.num_true + padding + room), POISON)
        self.memory = self.memory.to(device, dtype)
        self.logits = self.memory[:, shift : shift + self.num_true + padding]
        self.logits[:, : self.num_true] = values.to(device, dtype)
        self.labels = torch.randint(self.num_true, (num_tokens,), generator=generator).to(device)
        self.weights = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
        self.weights[1::4] = 0

    def results(self, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return losses and the gradient of the logits, which is in their memory."""
        logits = self.logits.detach().requires_grad_()
        part = VocabularyPart(0, self.num_true)
        found = vocab_cross_entropy(logits.view_as(logits), self.labels, part, ALONE, z_loss=z_loss)
        weights = self.weights.to(found.device, found.dtype)
        (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
        assert gradient.data_ptr() == self.logits.data_ptr()
        return found.detach(), gradient

    def reference(self, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        logits = self.logits[:, : self.num_true].cpu().double().requires_grad_()
        found = cross_entropy_reference(logits, self.labels.cpu(), z_loss)
        return found.detach(), torch.autograd.grad((found * self.weights).sum(), logits)[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.double()).norm() / want.double().norm().clamp(min=1e-300))


def check(case: Case, z_loss: float = 0.0) -> None:
    """Results against float64; nothing beside the logits is written, and padding takes no part."""
    dtype, shape = case.logits.dtype, case.logits.shape
    wanted_losses, expected = case.reference(z_loss)
    beside = case.memory.clone()
    found, gradient = case.results(z_loss)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # losses and gradients near 0 are differences of larger numbers
    assert (found.cpu().double() - wanted_losses).abs().max() <= 20 * TOLERANCES[found.dtype]
    error = (gradient[:, : case.num_true].cpu().double() - expected).norm()
    assert error < TOLERANCES[dtype] * max(expected.norm(), case.weights.norm())
    assert not gradient[:, case.num_true :].any()
    assert not gradient[case.weights.to(gradient.device) == 0].any()
    start = (case.logits.data_ptr() - case.memory.data_ptr()) // case.logits.itemsize
    for here in (slice(0, start), slice(start + shape[1], None)):
        assert torch.equal(case.memory[:, here], beside[:, here])


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", SHAPES, **IDS)
def test_equals_the_float64_reference(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    before = native.csrc_calls()
    check(Case(shape, dtype, device), z_loss=1e-2)
    for op in ("cross_entropy_forward", "cross_entropy_backward"):
        assert native.csrc_calls()[op] == before.get(op, 0) + 1, f"the native {op} ran"


@settings(max_examples=25)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 3000), st.integers(0, 40)), st.sampled_from(list(TOLERANCES)),
    st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_any_shape_anywhere_in_memory(
    shape: tuple[int, int, int], dtype: torch.dtype, shift: int, room: int, z_loss: float
) -> None:
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        check(Case(shape, dtype, device, shift=shift, room=room), z_loss)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_gradients_by_finite_differences(z_loss: float, device: str) -> None:
    case = Case((4, 9, 2), torch.float64, device)

    case.logits[:, 9:] = 0
    at = VocabularyPart(0, case.num_true)
    weights, logits = case.weights.to(device), case.logits.clone()
    _, gradient = case.results(z_loss)
    for place in torch.ones_like(logits).nonzero().tolist():
        step = torch.zeros_like(logits)
        step[tuple(place)] = 1e-4
        ahead, back = (vocab_cross_entropy(logits + sign * step, case.labels, at, ALONE, z_loss=z_loss)
                       for sign in (1, -1))  # fmt: skip
        slope = ((ahead - back) * weights).sum() / 2e-4
        assert float(gradient[tuple(place)]) == pytest.approx(float(slope), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_parts_join_to_the_whole(dtype: torch.dtype, device: str) -> None:
    """Three parts of 50, 40 and 0 true columns; each rank has the labels of all."""
    case = Case((12, 90, 0), dtype, device)
    case.labels[:3] = torch.tensor([0, 49, 50])
    wanted_losses, expected = case.reference()
    parts = [case.logits[:, :50].clone(), case.logits[:, 50:].clone(), torch.full_like(case.logits[:, :8], POISON)]
    places = [VocabularyPart(0, 50), VocabularyPart(50, 40), VocabularyPart(90, 0)]
    sums = torch.stack([row_sums(part, case.labels, at) for part, at in zip(parts, places, strict=True)])
    largest = sums[:, 0].amax(0)
    joint = torch.stack([largest, (sums[:, 1] * (sums[:, 0] - largest).exp()).sum(0), sums[:, 2].sum(0)])
    wide = TOLERANCES[torch.float64 if dtype == torch.float64 else torch.float32]
    assert relative_error(losses(joint, 0.0), wanted_losses) < wide
    weights = case.weights.to(joint.device, joint.dtype)
    for part, at in zip(parts, places, strict=True):
        write_gradient(part, case.labels, at, factors(joint, weights, 0.0))
    assert relative_error(torch.cat(parts[:2], 1), expected) < TOLERANCES[dtype]
    assert not parts[2].any()


def test_the_first_pass_leaves_the_logits_alone(device: str) -> None:
    case = Case((6, 300, 20), torch.bfloat16, device)
    before = case.memory.clone()
    row_sums(case.logits, case.labels, VocabularyPart(0, 300))
    with torch.no_grad():
        vocab_cross_entropy(case.logits, case.labels, VocabularyPart(0, 300), ALONE)
    assert torch.equal(case.memory, before)


def test_logits_that_someone_saved_are_not_overwritten_in_silence(device: str) -> None:
    case = Case((4, 20, 0), torch.float32, device)
    logits = case.logits.detach().requires_grad_().exp()  # exp saves its result
    found = vocab_cross_entropy(logits, case.labels, VocabularyPart(0, 20), ALONE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_odd_rows(dtype: torch.dtype, device: str) -> None:
    """Logits of -inf, the largest and the lowest finite ones; NaN and rows without any finite logit give NaN."""
    case = Case((8, 700, 0), dtype, device)
    most = torch.finfo(dtype).max
    case.labels[:] = 3
    case.weights[:] = 1
    case.logits[0, 10:] = -torch.inf
    case.logits[1, :] = -most
    case.logits[2, 5] = most
    case.logits[3, 3] = -torch.inf
    case.logits[4, 650] = torch.nan
    case.logits[5, :] = -torch.inf
    case.logits[6, 99] = torch.inf
    wanted_losses, expected = case.reference()
    losses, gradient = case.results()
    wanted_losses[1], expected[1] = math.log(700), 1 / 700  # the reference loses it beside the lowest number
    expected[1, 3] -= 1
    wanted_losses[6] = torch.nan  # an infinite loss would do too
    torch.testing.assert_close(losses.cpu().double(), wanted_losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    for row in (0, 1, 2, 7):
        assert relative_error(gradient[row], expected[row]) < TOLERANCES[dtype], row
    for row in (4, 5, 6):
        assert bool(losses[row].isnan()), row
        assert bool(gradient[row].isnan().any()), row


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_weight_is_zero_whatever_it_holds(value: float, device: str) -> None:
    case = Case((3, 1100, 0), torch.bfloat16, device)
    case.logits[1] = value
    part = VocabularyPart(0, 1100)
    sums = row_sums(case.logits, case.labels, part)
    write_gradient(case.logits, case.labels, part, factors(sums, torch.tensor([1.0, 0.0, 1.0], device=device), 0.0))
    assert not case.logits[1].any()
    assert bool(case.logits[[0, 2]].any(1).all())


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    case, part = Case((40, 1072, 0), dtype, device), VocabularyPart(0, 1072)
    whole = row_sums(case.logits, case.labels, part)
    assert torch.equal(row_sums(case.logits, case.labels, part), whole)
    for start, stop in ((0, 1), (3, 4), (17, 40)):
        assert torch.equal(row_sums(case.logits[start:stop], case.labels[start:stop], part), whole[:, start:stop])


@settings(max_examples=10)
@given(tokens=st.integers(1, 200), num_threads=st.integers(2, 5))
def test_bits_do_not_depend_on_threads(tokens: int, num_threads: int) -> None:
    found = []
    for threads in (1, num_threads):
        torch.set_num_threads(threads)
        found.append(Case((tokens, 997, 3), torch.float32).results(0.1))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", SHAPES[:5], **IDS)
def test_bits_do_not_depend_on_the_instruction_set(
    shape: tuple[int, int, int], dtype: torch.dtype, every_simd: list[int]
) -> None:
    results = []
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        results.append(Case(shape, dtype).results())
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])


def test_no_token_and_no_column(device: str) -> None:
    for shape in ((0, 5), (3, 0)):
        logits, labels = torch.zeros(shape, device=device), torch.zeros(shape[0], dtype=torch.int64, device=device)
        sums = row_sums(logits, labels, VocabularyPart(0, shape[1]))
        assert sums.shape == (3, shape[0])
        assert not sums[1:].any()
        write_gradient(logits, labels, VocabularyPart(0, shape[1]), sums)


def test_bad_arguments_are_named() -> None:
    case, part = Case((4, 6, 0), torch.float32), VocabularyPart(0, 6)
    with pytest.raises(UserError, match=r"labels are torch.int32 \[4\]"):
        row_sums(case.logits, case.labels.int(), part)
    with pytest.raises(UserError, match=r"labels are torch.int64 \[3\]"):
        row_sums(case.logits, case.labels[:3], part)
    with pytest.raises(UserError, match=r"must be neighbours; strides are \(1, 4\)"):
        row_sums(case.logits.T.contiguous().T, case.labels, part)
    with pytest.raises(UserError, match=r"takes float64, float32, bfloat16 or float16, not torch.int32"):
        row_sums(case.logits.int(), case.labels, part)
    with pytest.raises(RuntimeError, match="bad argument"):
        row_sums(case.logits, case.labels, VocabularyPart(0, 7))
