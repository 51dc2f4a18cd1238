"""RoPE with QK-norm against float64, and its promises about bits, places in memory and far positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.rope import QkNorm, rope, rope_reference, rope_turns, turned

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
# tokens, N, K, H: packs that fill a lane, a warp's eight heads, odd ones, one kv head, heads longer than a warp's lanes
SHAPES = [(1, 1, 1, 2), (7, 4, 2, 64), (33, 3, 1, 128), (130, 16, 8, 64), (5, 6, 3, 96), (9, 5, 5, 22), (3, 2, 1, 1024)]
IDS = {"ids": str}
NAMES = ("q", "k", "v", "dqkv", "dq_weight", "dk_weight")


class Case:
    """Inputs of one shape in one dtype, and what an op makes of them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
        self.tokens, self.num_heads, self.num_kv_heads, self.size = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def normal(*of: int) -> Tensor:
            return torch.randn(of, generator=generator, dtype=torch.float64).to(device, dtype)

        self.qkv = normal(self.tokens, (self.num_heads + 2 * self.num_kv_heads) * self.size)
        self.positions = torch.randint(5000, (self.tokens,), generator=generator).to(device)
        self.weights = (1 + 0.2 * normal(self.size), 1 + 0.2 * normal(self.size))
        self.gradients = [normal(self.tokens, heads, self.size) for heads in (self.num_heads, *[self.num_kv_heads] * 2)]
        self.dtype = dtype

    def turns(self) -> Tensor:
        return rope_turns(self.positions, self.size, 10000.0, self.dtype)

    def wide(self) -> "Case":
        made = Case((self.tokens, self.num_heads, self.num_kv_heads, self.size), torch.float64)
        made.qkv, made.positions = self.qkv.cpu().double(), self.positions.cpu()
        made.weights = tuple(each.cpu().double() for each in self.weights)  # type: ignore[assignment]
        made.gradients = [each.cpu().double() for each in self.gradients]
        return made

    def cut(self, start: int, stop: int) -> "Case":
        made = Case((stop - start, self.num_heads, self.num_kv_heads, self.size), self.dtype)
        made.qkv, made.positions, made.weights = self.qkv[start:stop], self.positions[start:stop], self.weights
        made.gradients = [each[start:stop] for each in self.gradients]
        return made

    def results(self, *, with_norm: bool = True, form=rope, **options: bool) -> list[Tensor]:
        qkv = self.qkv.clone().requires_grad_()
        weights = [weight.detach().requires_grad_() for weight in self.weights] if with_norm else []
        norm = QkNorm(*weights, 1e-5) if with_norm else None
        # times one: an op in place must not write into a leaf
        outputs = form(1 * qkv, self.turns(), self.num_heads, self.num_kv_heads, norm=norm, **options)
        return [
            *(each.detach() for each in outputs),
            *torch.autograd.grad(outputs, (qkv, *weights), self.gradients),
        ]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.double()).norm() / want.double().norm().clamp(min=1e-300))


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", SHAPES, **IDS)
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk_norm"])
def test_equals_the_float64_reference(shape: tuple[int, ...], dtype: torch.dtype, with_norm: bool, device: str) -> None:
    case = Case(shape, dtype, device)
    before = native.csrc_calls()
    got = case.results(with_norm=with_norm)
    after = native.csrc_calls()
    for op in ("rope_forward", "rope_backward"):
        assert after[op] == before.get(op, 0) + 1, f"the native {op} ran"
    want = case.wide().results(with_norm=with_norm, form=rope_reference)
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert (a.dtype, a.device.type, a.shape) == (dtype, device, b.shape), name
        assert relative_error(a, b) < TOLERANCES[dtype], name


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk_norm"])
def test_gradients_by_finite_differences(with_norm: bool, device: str) -> None:
    case = Case((3, 4, 2, 8), torch.float64, device)
    turns = case.turns()

    def run(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        return rope(qkv, turns, 4, 2, norm=QkNorm(q_weight, k_weight, 1e-3) if with_norm else None)

    inputs = [each.requires_grad_() for each in (case.qkv, *case.weights)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
def test_in_place_is_the_same_in_the_memory_of_its_input(dtype: torch.dtype, device: str) -> None:
    case = Case((11, 4, 2, 64), dtype, device)
    assert_same_bits(case.results(with_norm=False, in_place=True), case.results(with_norm=False))
    q, k, v = rope(case.qkv, case.turns(), 4, 2, in_place=True)
    start = case.qkv.data_ptr()
    assert [each.data_ptr() - start for each in (q, k, v)] == [n * 64 * case.qkv.itemsize for n in (0, 4, 6)]


def test_a_tensor_that_someone_saved_is_not_overwritten_in_silence(device: str) -> None:
    case = Case((4, 2, 1, 16), torch.float32, device)
    qkv = case.qkv.requires_grad_().exp()  # exp saves its result
    q, _, _ = rope(qkv, case.turns(), 2, 1, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


def test_distances_alone_matter_far_out(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 3 * 64, generator=generator).to(device).expand(64, -1)
    scores = []
    for first in (0, 1_000_000):
        positions = torch.arange(first, first + 64, device=device)
        q, k, _ = rope(row, rope_turns(positions, 64, 10000.0, torch.float32), 1, 1)
        scores.append(torch.einsum("tnh,unh->tu", q, k))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_turns_are_those_of_float64(device: str) -> None:
    positions = torch.tensor([0, 1, 4095, 1_000_000], device=device)
    turns = rope_turns(positions, 8, 500000.0, torch.float32)
    assert turns.dtype == torch.float32
    angles = positions.cpu().double().unsqueeze(1) * 500000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(turns.cpu().double(), torch.cat([angles.cos(), angles.sin()], 1), rtol=0, atol=1e-7)
    assert torch.equal(turns[0].cpu(), torch.tensor([1.0] * 4 + [0.0] * 4))


def test_without_turns_only_the_norm_acts(device: str) -> None:
    case = Case((6, 2, 1, 32), torch.float64, device)
    norm = QkNorm(*case.weights, 1e-5)
    for got, want in zip(rope(case.qkv, None, 2, 1, norm=norm), rope_reference(case.qkv, None, 2, 1, norm=norm)):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert torch.equal(rope(case.qkv, None, 2, 1)[0].flatten(1), case.qkv[:, :64])


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("size", [22, 64, 96])
def test_a_token_does_not_depend_on_the_others(size: int, dtype: torch.dtype, device: str) -> None:
    case = Case((150, 4, 2, size), dtype, device)
    whole = case.results()
    for start, stop in ((0, 1), (3, 4), (17, 150)):
        for name, part, all_of_it in zip(NAMES[:4], case.cut(start, stop).results(), whole, strict=False):
            assert torch.equal(part, all_of_it[start:stop]), name


@settings(max_examples=15)
@given(tokens=st.integers(1, 3000), num_threads=st.integers(2, 5), with_norm=st.booleans())
def test_bits_do_not_depend_on_threads(tokens: int, num_threads: int, with_norm: bool) -> None:
    case = Case((tokens, 4, 2, 64), torch.float32)
    torch.set_num_threads(1)
    want = case.results(with_norm=with_norm)
    torch.set_num_threads(num_threads)
    assert_same_bits(case.results(with_norm=with_norm), want)


@pytest.mark.parametrize("dtype", TOLERANCES, **IDS)
@pytest.mark.parametrize("shape", SHAPES, **IDS)
def test_bits_do_not_depend_on_the_instruction_set(
    shape: tuple[int, ...], dtype: torch.dtype, every_simd: list[int]
) -> None:
    case = Case(shape, dtype)
    found = []
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        found.append(case.results())
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_weight_gradients_repeat_bit_for_bit(device: str) -> None:
    case = Case((5000, 4, 2, 64), torch.bfloat16, device)
    assert_same_bits(case.results(), case.results())


def test_bf16_is_float32_rounded_once() -> None:
    case = Case((70, 3, 1, 34), torch.bfloat16)
    wide = Case((70, 3, 1, 34), torch.float32)
    wide.qkv, wide.positions = case.qkv.float(), case.positions
    wide.weights = tuple(each.float() for each in case.weights)  # type: ignore[assignment]
    wide.gradients = [each.float() for each in case.gradients]
    assert_same_bits(case.results(), [each.bfloat16() for each in wide.results()])


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk_norm"])
def test_gradients_may_be_anywhere(with_norm: bool, device: str) -> None:
    case = Case((12, 4, 2, 64), torch.bfloat16, device)
    want = case.results(with_norm=with_norm)
    dense = case.gradients
    case.gradients = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in dense]  # heads first in memory
    assert_same_bits(case.results(with_norm=with_norm), want)
    case.gradients = [each.mT.contiguous().mT for each in dense]  # elements of a head apart
    assert_same_bits(case.results(with_norm=with_norm), want)
    shifted = []
    for each in dense:  # rows that start at odd places
        room = torch.empty(12, each[0].numel() + 3, dtype=each.dtype, device=device)
        shifted.append(room[:, 1:-2].unflatten(1, each.shape[1:]).copy_(each))
    case.gradients = shifted
    for name, a, b in zip(NAMES, case.results(with_norm=with_norm), want, strict=False):
        assert relative_error(a, b.cpu()) < TOLERANCES[torch.bfloat16], name


def test_outputs_without_gradients(device: str) -> None:
    case = Case((5, 2, 1, 16), torch.float32, device)
    qkv = case.qkv.requires_grad_()
    _, _, v = rope(qkv, case.turns(), 2, 1)
    v.sum().backward()
    assert qkv.grad is not None
    assert torch.equal(qkv.grad[:, -16:], torch.ones(5, 16, device=device))
    assert not qkv.grad[:, :-16].any()


@pytest.mark.ci
@pytest.mark.slow
def test_many_tokens(device: str) -> None:
    case = Case((40_000, 2, 1, 64), torch.float32, device)
    for name, a, b in zip(NAMES, case.results(), case.wide().results(form=rope_reference), strict=True):
        assert relative_error(a, b) < TOLERANCES[torch.float32], name


def test_in_place_under_inference_mode(device: str) -> None:
    case = Case((5, 2, 1, 16), torch.float32, device)
    want = rope(case.qkv, case.turns(), 2, 1)
    with torch.inference_mode():
        got = rope(1 * case.qkv, case.turns(), 2, 1, in_place=True)
    assert_same_bits(list(got), list(want))


def test_turned_heads_are_those_of_the_op() -> None:
    case = Case((9, 2, 1, 16), torch.bfloat16)
    q, k, _ = case.qkv.unflatten(1, (4, 16)).split([2, 1, 1], 1)
    want = rope(case.qkv, case.turns(), 2, 1)
    assert torch.equal(turned(q, case.turns()), want[0])
    assert torch.equal(turned(k, case.turns()), want[1])
    assert turned(q, None) is q


def test_no_token(device: str) -> None:
    case = Case((0, 2, 1, 16), torch.float32, device)
    results = case.results()
    assert [len(each) for each in results[:4]] == [0] * 4
    assert not results[4].any()


def test_bad_arguments_are_named() -> None:
    case = Case((4, 2, 1, 8), torch.float32)
    turns, norm = case.turns(), QkNorm(*case.weights, 1e-5)
    with pytest.raises(UserError, match=r"qkv \[4, 32\] does not hold rows of 3 \+ 2 \* 1 heads"):
        rope(case.qkv, turns, 3, 1)
    with pytest.raises(UserError, match=r"turns are torch.float32 \[4, 6\], not torch.float32 \[4, 8\]"):
        rope(case.qkv, turns[:, :6], 2, 1)
    with pytest.raises(UserError, match=r"not torch\.float64"):
        rope(case.qkv.double(), turns, 2, 1)
    with pytest.raises(UserError, match="cannot run in place"):
        rope(case.qkv, turns, 2, 1, norm=norm, in_place=True)
    with pytest.raises(UserError, match="must be contiguous"):
        rope(case.qkv.mT.contiguous().mT, turns, 2, 1, in_place=True)
    with pytest.raises(UserError, match=r"a weight is torch.float32 \[7\]"):
        rope(case.qkv, turns, 2, 1, norm=QkNorm(case.weights[0][:7], case.weights[1], 1e-5))
    with pytest.raises(UserError, match=r"takes float64, float32, bfloat16 or float16, not torch.int32"):
        rope(case.qkv.int(), turns, 2, 1)
