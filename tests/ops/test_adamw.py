"""AdamW against float64 and torch's own, its promises about bits, and the squared norms that go before it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.support.plain_adamw import adamw_reference
from threefold.errors import UserError
from trainer.config import OptimConfig
from trainer.ops import native, split
from trainer.ops.adamw import CHUNK, Interval, IntervalTable, with_whole_master

OPTIM = OptimConfig(beta1=0.9, beta2=0.95, weight_decay=0.1)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6}
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = [(F64, F64, False), (F32, F32, False), (F32, BF16, False), (F32, F32, True), (F32, BF16, True)]
of_every_kind = pytest.mark.parametrize(("dtype", "moments", "splits"), KINDS, ids=str)
SIZES = (1, 3, 64, 1000, 4099, CHUNK, CHUNK + 1, 3 * CHUNK - 5)
POISON = 77.0
STATES = ("gradient", "exp_avg", "exp_avg_sq", "master", "published")


class Case:
    """Intervals in buffers with poisoned elements around them; `shift` moves them off their alignment."""

    def __init__(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        shift: int = 0,
        moments: torch.dtype | None = None,
        splits: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(sizes))
        self.buffers: list[Tensor] = []
        self.intervals = []
        for row, size in enumerate(sizes):
            values = torch.randn(4, size, generator=generator, dtype=torch.float64)
            values[1:3] *= 0.1
            values[2].square_()
            kept = moments or dtype
            kinds = [dtype, kept, kept, split.LOW if splits else dtype] + [torch.bfloat16] * (dtype == torch.float32)
            states = []
            for kind, value in zip(kinds, [*values, torch.full((size,), POISON)], strict=False):
                self.buffers.append(torch.full((size + 16,), POISON, dtype=kind, device=device))
                states.append(self.buffers[-1][shift : shift + size].copy_(value))
            gradient, exp_avg, exp_avg_sq, master, *published = states
            if splits:
                split.split_into(published[0], master, values[3].float().to(device))
            place = published[0] if published and (splits or row % 3) else None
            self.intervals.append(Interval(gradient, exp_avg, exp_avg_sq, master, place, row % 2 == 0, row))
        self.shift, self.device = shift, device

    def step(self, step: int = 0, *, factor: float = 1.0, is_bad: float = 0.0, optim: OptimConfig = OPTIM) -> None:
        decisions = self.decisions(factor, is_bad)
        IntervalTable(self.intervals).adamw(optim, 3e-3, step, factor=decisions[0], is_bad=decisions[1])

    def decisions(self, factor: float, is_bad: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(factor, dtype=torch.float64, device=self.device), torch.tensor(is_bad, device=self.device)

    def states(self) -> Iterator[tuple[str, Tensor]]:
        for number, interval in enumerate(self.intervals):
            for name in STATES:
                if getattr(interval, name) is not None:
                    yield f"{name} {number}", getattr(interval, name).cpu()

    def in_float64(self) -> "Case":
        """The same values, published ones left out."""
        made = Case([], torch.float64)
        for each in self.intervals:
            whole = with_whole_master(each)
            states = {name: getattr(whole, name).cpu().double().clone() for name in STATES[:-1]}
            made.intervals.append(replace(each, **states, published=None))
        return made

    def assert_the_rest_is_untouched(self) -> None:
        for number, buffer in enumerate(self.buffers):
            size = len(buffer) - 16
            around = torch.cat([buffer[: self.shift], buffer[self.shift + size :]])
            assert (around == POISON).all(), number


def assert_same_bits(got: Case, want: Case) -> None:
    for (name, a), (_, b) in zip(got.states(), want.states(), strict=True):
        assert torch.equal(a, b), name


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_equals_the_float64_reference(dtype: torch.dtype, shift: int, device: str) -> None:
    case = Case(SIZES, dtype, device, shift=shift)
    want = case.in_float64()
    before = native.csrc_calls().get("adamw", 0)
    for step in range(3):
        case.step(step, factor=0.4)
        factor, is_bad = want.decisions(0.4, 0.0)
        adamw_reference(want.intervals, OPTIM, 3e-3, step, factor=factor, is_bad=is_bad)
    assert native.csrc_calls()["adamw"] == before + 3, "one call a step, whatever the number of intervals"
    for got, exact in zip(case.intervals, want.intervals, strict=True):
        for name in STATES[:-1]:
            assert relative_error(getattr(got, name).cpu(), getattr(exact, name)) < TOLERANCES[dtype], (name, got.row)
        if got.published is not None:
            assert torch.equal(got.published, got.master.bfloat16())
    case.assert_the_rest_is_untouched()


@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
def test_equals_torch(beta1: float, device: str) -> None:
    optim = replace(OPTIM, beta1=beta1)
    case = Case((300, 40), torch.float64, device)
    copies = [
        replace(interval, **{name: state.clone() for name, state in named_states(interval)})
        for interval in case.intervals
    ]
    for step in range(5):
        for interval, copy in zip(case.intervals, copies, strict=True):
            interval.gradient.add_(step)
            states = ([interval.gradient * 0.5], [copy.exp_avg], [copy.exp_avg_sq], [], [torch.tensor(step + 1.0)])
            torch._fused_adamw_(  # what torch.optim.AdamW calls; importing that takes seconds
                [copy.master], *([state.to(device) for state in part] for part in states),
                lr=3e-3, beta1=beta1, beta2=0.95, weight_decay=0.1 * interval.decays, eps=optim.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        case.step(step, factor=0.5, optim=optim)
    for interval, copy in zip(case.intervals, copies, strict=True):
        torch.testing.assert_close(interval.master, copy.master, rtol=1e-13, atol=1e-15)


@settings(max_examples=10)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    shift=st.integers(0, 8),
    cut=st.floats(0, 1),
    dtype=st.sampled_from(sorted(TOLERANCES, key=str)),
    num_threads=st.integers(1, 4),
)
def test_bits_do_not_depend_on_place_cut_or_threads(
    sizes: list[int], shift: int, cut: float, dtype: torch.dtype, num_threads: int
) -> None:
    sizes = [*sizes, 3 * CHUNK]
    whole, parts = Case(sizes, dtype), Case(sizes, dtype, shift=shift)
    whole.step(2, factor=0.7)
    all_parts, parts.intervals = parts.intervals, []
    for each in all_parts:
        middle = int(cut * each.gradient.numel())
        for bounds in (slice(0, middle), slice(middle, None)):
            views = {name: each_state[bounds] for name, each_state in named_states(each)}
            parts.intervals.append(replace(each, **views))
    torch.set_num_threads(num_threads)
    parts.step(2, factor=0.7)
    parts.intervals = all_parts
    assert_same_bits(parts, whole)
    parts.assert_the_rest_is_untouched()


def named_states(interval: Interval) -> list[tuple[str, Tensor]]:
    return [(name, getattr(interval, name)) for name in STATES if getattr(interval, name) is not None]


@of_every_kind
def test_bits_do_not_depend_on_the_instruction_set(
    dtype: torch.dtype, moments: torch.dtype, splits: bool, every_simd: list[int]
) -> None:
    results = []
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        case = Case((1, 515, 4099), dtype, shift=1, moments=moments, splits=splits)
        case.step(4, factor=0.3)
        results.append((case, squares(case)))
    for case, norms in results[1:]:
        assert_same_bits(case, results[0][0])
        assert torch.equal(norms, results[0][1])


@of_every_kind
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_the_bits_of_a_device_are_the_cpus(
    dtype: torch.dtype, moments: torch.dtype, splits: bool, shift: int, device: str
) -> None:
    case = Case(SIZES, dtype, device, shift=shift, moments=moments, splits=splits)
    on_cpu = Case(SIZES, dtype, moments=moments, splits=splits)
    for step in range(3):
        case.step(step, factor=0.4)
        on_cpu.step(step, factor=0.4)
    assert_same_bits(case, on_cpu)


@of_every_kind
def test_a_bad_step_changes_no_bit(dtype: torch.dtype, moments: torch.dtype, splits: bool, device: str) -> None:
    case, untouched = (Case(SIZES, dtype, device, moments=moments, splits=splits) for _ in range(2))
    case.step(factor=float("nan"), is_bad=1.0)
    assert_same_bits(case, untouched)
    case.step(factor=0.5)
    assert not torch.equal(case.intervals[0].master, untouched.intervals[0].master)


@pytest.mark.parametrize("shift", [0, 1])
def test_bf16_moments_are_rounded_once_a_step(shift: int, device: str) -> None:
    case = Case(SIZES, torch.float32, device, shift=shift, moments=torch.bfloat16)
    for step in range(3):
        wide = Case(SIZES, torch.float32, device)
        wide.intervals = [
            replace(each, **{name: state.float() for name, state in named_states(each) if name != "published"})
            for each in case.intervals
        ]
        wide.intervals = [replace(each, master=each.master.clone(), published=None) for each in wide.intervals]
        wide.step(step, factor=0.4)
        case.step(step, factor=0.4)
        for got, exact in zip(case.intervals, wide.intervals, strict=True):
            assert torch.equal(got.master, exact.master)
            assert torch.equal(got.exp_avg, exact.exp_avg.bfloat16())
            assert torch.equal(got.exp_avg_sq, exact.exp_avg_sq.bfloat16())
    case.assert_the_rest_is_untouched()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_split_masters_take_the_steps_of_whole_ones(moments: torch.dtype, shift: int, device: str) -> None:
    case = Case(SIZES, torch.float32, device, shift=shift, moments=moments, splits=True)
    for step in range(3):
        whole = Case([], torch.float32, device)
        for each in case.intervals:
            states = {name: state.clone() for name, state in named_states(with_whole_master(each))}
            whole.intervals.append(replace(each, **(states | {"published": None})))
        whole.step(step, factor=0.4)
        case.step(step, factor=0.4)
        for got, exact in zip(case.intervals, whole.intervals, strict=True):
            want = Case((exact.master.numel(),), torch.float32, device, splits=True).intervals[0]
            split.split_into(want.published, want.master, exact.master)
            assert torch.equal(got.master, want.master)
            assert torch.equal(got.published, want.published)
            assert torch.equal(got.exp_avg, exact.exp_avg)
            assert torch.equal(got.exp_avg_sq, exact.exp_avg_sq)
    case.assert_the_rest_is_untouched()


def test_tiny_and_zero_gradients(device: str) -> None:
    case = Case((500,), torch.float32, device)
    (interval,) = case.intervals
    interval.gradient.fill_(1e-30)
    interval.gradient[:100] = 0
    for state in (interval.exp_avg, interval.exp_avg_sq):
        state.zero_()
    before = interval.master.clone()
    case.step()
    assert torch.equal(interval.master[:100], before[:100] * (1 - 3e-3 * 0.1))
    assert interval.master.isfinite().all()


def squares(case: Case, *, num_rows: int | None = None) -> Tensor:
    out = torch.full((num_rows or len(case.intervals),), POISON, dtype=torch.float64, device=case.device)
    IntervalTable(case.intervals).write_squared_norms(out)
    return out.cpu()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_squared_norms_are_summed_in_float64(dtype: torch.dtype, device: str) -> None:
    case = Case(SIZES, dtype, device)
    case.intervals = [replace(each, row=2 * each.row + 1) for each in case.intervals]
    got = squares(case, num_rows=2 * len(SIZES) + 1)
    want = torch.stack([each.gradient.cpu().double().square().sum() for each in case.intervals])
    torch.testing.assert_close(got[1::2], want, rtol=1e-14, atol=0)
    assert (got[::2] == POISON).all(), "rows of others are left as they are"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_squared_norm_depends_on_its_interval_alone(dtype: torch.dtype, device: str) -> None:
    want = squares(Case(SIZES, dtype, device))
    for shift in (1, 2, 4, 7):
        moved = Case(SIZES, dtype, device, shift=shift)
        assert torch.equal(squares(moved), want), shift
        moved.intervals.reverse()
        assert torch.equal(squares(moved), want)
    torch.set_num_threads(3)
    assert torch.equal(squares(Case(SIZES, dtype, device)), want)


def test_not_finite_gradients_show_in_their_row(device: str) -> None:
    case = Case((5, 600, 7), torch.float32, device)
    case.intervals[0].gradient[4], case.intervals[1].gradient[599] = float("inf"), float("nan")
    found = squares(case)
    assert found[0] == float("inf")
    assert found[1].isnan()
    assert found[2].isfinite()


def test_no_intervals() -> None:
    case = Case([], torch.float32)
    case.step()
    assert squares(case, num_rows=2).tolist() == [POISON, POISON]


def test_intervals_that_do_not_fit_are_named() -> None:
    (interval,) = Case((8,), torch.float32).intervals
    with pytest.raises(UserError, match="exp_avg has 7 elements, the gradient 8"):
        IntervalTable([replace(interval, exp_avg=interval.exp_avg[:7])])
    with pytest.raises(UserError, match=r"gradient is torch.float64 on cpu .* not torch.float32 on cpu"):
        IntervalTable([replace(interval, gradient=interval.gradient.double())])
    with pytest.raises(UserError, match=r"published is torch.float64 .* not torch.bfloat16"):
        IntervalTable([replace(interval, published=interval.master.double())])
    with pytest.raises(UserError, match=r"with strides \(2,\)"):
        IntervalTable([replace(interval, **{name: getattr(interval, name)[::2] for name in STATES[:-1]})])
    wide = Case((8,), torch.float64).intervals[0]
    with pytest.raises(UserError, match="a float64 master has float64 moments, and is published as it is"):
        IntervalTable([replace(wide, published=wide.master.bfloat16())])
    with pytest.raises(UserError, match="the high bits of a split master are the published weight, which is not there"):
        IntervalTable([replace(interval, master=interval.master.to(split.LOW), published=None)])
    halves = {name: getattr(interval, name).half() for name in ("exp_avg", "exp_avg_sq")}
    with pytest.raises(UserError, match=r"moments are of torch.float32 or bfloat16, not of torch.float16"):
        IntervalTable([replace(interval, **halves)])


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_more_elements_than_an_int_counts() -> None:
    size = 2**31 + 3 * CHUNK + 5
    if torch.cuda.mem_get_info()[0] < 20 * size:
        pytest.skip(f"needs {20 * size >> 30} GiB of GPU memory")
    states = [torch.zeros(size, device="cuda") for _ in range(4)]
    gradient, exp_avg, exp_avg_sq, master = states
    published = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    table = IntervalTable([Interval(gradient, exp_avg, exp_avg_sq, master, published, True, 0)])
    gradient[-1], gradient[2**31] = 3.0, 4.0
    out = torch.zeros(1, dtype=torch.float64, device="cuda")
    table.write_squared_norms(out)
    assert out.item() == 25
    one, zero = torch.ones((), dtype=torch.float64, device="cuda"), torch.zeros((), device="cuda")
    table.adamw(OPTIM, 0.5, 0, factor=one, is_bad=zero)
    assert published.nonzero().flatten().tolist() == [2**31, size - 1]
    assert published[-1].item() == published[2**31].item() == -0.5
