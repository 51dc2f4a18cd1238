"""Units: what is read and added between the borders of passes, and that every schedule ends them with the same sums."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import Different, require_equal
from tests.trainer.support.parity import config_for, local_batch, make_engine, run_steps, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.linear.weight import Weight
from trainer.mesh.group import Network
from trainer.store.residence import Residence
from trainer.store.unit import Border, Unit
from trainer.verify.threads import run_threads, wrapped

Patch = pytest.MonkeyPatch


def config(model: str, layout: str, schedule: Any = "1f1b", **train: Any) -> Config:
    made = small(config_for(model, ParallelLayout.parse(layout)))
    return replace(
        made, parallel=replace(made.parallel, schedule=schedule), train=replace(made.train, **train),
        model=replace(made.model, num_layers=4),
    )  # fmt: skip


def sums(rank: int, config: Config, *, network: Network) -> dict[str, list[list[torch.Tensor]]]:
    """The gradients that a unit's weights have at the end of each of its passes of a step, before any is summed."""
    apart = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=False))
    engine = make_engine(rank, apart, network=network)
    gradients = defaultdict[str, list[list[torch.Tensor]]](list)

    def ending(real: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def end(unit: Unit) -> None:
            if unit._wgrads is engine.store.wgrads:
                gradients[unit.name].append([weight._gradient.clone() for weight in unit.weights])
            real(unit)

        return end

    with wrapped(Unit, "end_adding", ending):
        engine.train_step(0, local_batch(config, 0, engine.mesh))
    return dict(gradients)


def compare(layout: str, schedule: str, **train: Any) -> None:
    """Each end of a pass under a schedule, and under 1F1B."""
    built = config("gpt2", layout, schedule, **train)
    one, other = (
        run_threads(layout_of(each).world_size, sums, each) for each in (config("gpt2", layout, "1f1b", **train), built)
    )
    for ours, others in zip(one, other, strict=True):
        require_equal(ours.keys() == others.keys(), "units")
        for name, ends in ours.items():
            require_equal(len(ends) == len(others[name]) == built.train.gradient_accumulation_steps, name)
            for number, (left, right) in enumerate(zip(ends, others[name], strict=True)):
                equal = all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
                require_equal(equal, f"{name}, micro-batch {number}")


@pytest.mark.parametrize(
    ("layout", "schedule", "train"),
    [
        ("pp2", "zb-h1", {}),
        ("pp2", "gpipe", {"max_logits_gib": 1e-6, "recompute": "full"}),
        *(
            pytest.param(layout, schedule, train, marks=pytest.mark.slow)
            for layout in ("pp2-virtual2", "tp2-pp2", "pp4")
            for schedule in ("zb-h1", "gpipe")
            for train in ({}, {"max_logits_gib": 1e-6, "recompute": "full"})
        ),
    ],
)
def test_a_pass_ends_with_the_sums_up_to_its_micro_batch(layout: str, schedule: str, train: dict[str, Any]) -> None:
    """Bit for bit, norms and biases included: nothing of a later micro-batch is in them."""
    compare(layout, schedule, **train)


def add_unchecked(weight: Weight, compute: Callable[[torch.Tensor, bool], object] | None, *, ends: bool = True) -> None:
    """Add to a gradient whatever pass is in work."""
    if compute is not None:
        compute(weight._gradient, weight._is_first)
        weight._is_first = False
    weight._num_ended += ends and weight._wgrads.is_last


def biases_at_once(patch: Patch) -> None:
    """The bias of a later micro-batch comes before products that were put off."""
    real = Weight.add_gradient

    def add(weight: Weight, add_to: Callable[[torch.Tensor, bool], object], *, ends: bool = True) -> None:
        if weight.name.endswith("bias"):
            add_unchecked(weight, add_to, ends=ends)
        else:
            real(weight, add_to, ends=ends)

    patch.setattr(Weight, "add_gradient", add)


def ends_in_b(patch: Patch) -> None:
    """The products that are put off come after the end."""

    def end(unit: Unit) -> None:
        unit.end_adding()
        unit.release()

    patch.setattr(Weight, "_add", add_unchecked)
    patch.setattr(Unit, "begin_backward", Unit.use)
    patch.setattr(Unit, "end_backward", end)


@pytest.mark.parametrize("plant", [biases_at_once, ends_in_b])
def test_sums_at_ends_see(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(Different):
        compare("pp2", "zb-h1")


def leased(patch: Patch) -> None:
    """Values are in memory that is new for each pass and worthless after it."""
    kept: dict[Weight, torch.Tensor] = {}
    real_use, real_release = Unit.use, Unit.release

    def use(unit: Unit) -> list[Residence]:
        opened = real_use(unit)
        for weight in unit.weights:
            weight._values = kept.setdefault(weight, weight._values).clone()
        return opened

    def release(unit: Unit) -> None:
        real_release(unit)
        for weight in unit.weights:
            weight._values.fill_(torch.nan)

    patch.setattr(Unit, "use", use)
    patch.setattr(Unit, "release", release)


@pytest.mark.parametrize(
    ("model", "layout", "schedule", "train"),
    [
        ("llama", "tp1", "1f1b", {}),
        ("gpt2", "pp2", "zb-h1", {"recompute": "full"}),
        ("llama", "pp2", "gpipe", {"max_logits_gib": 1e-6}),
        *(
            pytest.param(model, layout, schedule, train, marks=pytest.mark.slow)
            for model in ("llama", "gpt2")
            for layout, schedule in (("tp2-dp2", "1f1b"), ("tp2-pp2", "zb-h1"), ("pp2-virtual2", "1f1b"))
            for train in ({}, {"recompute": "full", "max_logits_gib": 1e-6})
        ),
    ],
)
def test_no_value_is_kept_from_one_pass_to_another(
    model: str, layout: str, schedule: str, train: dict[str, Any], monkeypatch: Patch
) -> None:
    """Norms read their weights again in the backward; what was put off reads none."""
    made = config(model, layout, schedule, **train)
    expected = run_threads(layout_of(made).world_size, run_steps, made, 2)
    leased(monkeypatch)
    for run, other in zip(run_threads(layout_of(made).world_size, run_steps, made, 2), expected, strict=True):
        for key in ("losses", "norms", "evaluation"):
            assert run[key] == other[key], key


def test_a_border_changes_nothing_and_comes_once_a_pass() -> None:
    events: list[str] = []

    class Noted(Unit):
        def use(self) -> list[Residence]:
            events.append(f"use {self.name}")
            return []

        def release(self) -> None:
            events.append(f"release {self.name}")

        def begin_adding(self) -> None:
            events.append(f"begin {self.name}")

        def end_adding(self) -> None:
            events.append(f"end {self.name}")

    engine = make_engine(0, config("llama", "tp1"))
    one, two = (Noted(name, lambda name: None, engine.store.wgrads) for name in ("one", "two"))
    x = torch.arange(3.0, requires_grad=True)
    y = Border(one, two).cross(Border(None, one).cross(x))
    assert events == ["use one", "use two", "release one"]
    assert torch.equal(y, x)
    events.clear()
    with engine.store.wgrads.putting_off() as put_off:
        (3 * y).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    assert events == ["use one", "release two", "release one"]
    for each in put_off:
        each()
    assert events[3:] == ["begin one", "end two", "end one"]
    events.clear()
    with torch.no_grad():
        assert Border(one, None).cross(x) is x
    assert events == ["release one"]
