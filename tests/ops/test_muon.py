"""Muon's passes over state: the kernels have the bits of plain torch, which is what a CPU runs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainer.ops import muon, native, split
from trainer.ops.muon import MuonPart, MuonTable

SIZES, MOMENTUM, LR, DECAY = (1, 3, 64, 1000, 4104, 40000), 0.95, 0.02, 0.1
KINDS = {  # dtype of gradients, of moments and of weights; masters are split, or not
    "fp64": (torch.float64, torch.float64, None, False),
    "fp32": (torch.float32, torch.float32, None, False),
    "bf16": (torch.float32, torch.float32, torch.bfloat16, False),
    "fp16": (torch.float32, torch.bfloat16, torch.float16, False),
    "split": (torch.float32, torch.bfloat16, torch.bfloat16, True),
}
of_each = pytest.mark.parametrize("kind", KINDS)


def parts_of(kind: str, device: str) -> list[MuonPart]:
    wide, moments, weights, splits = KINDS[kind]
    generator, parts, sent, returned = torch.Generator().manual_seed(5), list[MuonPart](), 8, sum(SIZES)
    for number, size in enumerate(SIZES):
        numbers = torch.randn(3, size, generator=generator, dtype=torch.float64).to(device, wide)
        gradient, moment, master = (each.clone() for each in numbers)  # aligned, but for the fourth
        published = None if weights is None else master.to(weights)
        if splits:
            assert published is not None
            low = torch.empty(size, dtype=split.LOW, device=device)
            split.split_into(published, low, master)
            master = low
        returned -= size
        places = None if number == 2 else sent + (number == 3), returned
        factors = 0.5 + number, float(number % 2), 1.5
        parts.append(MuonPart(gradient, moment.to(moments), master, published, *places, *factors))
        sent += 2 * size
    return parts


def results(parts: list[MuonPart], form: str, *, is_bad: float = 0.0) -> list[Tensor]:
    """What a step leaves and sends, of copies of parts."""
    device, wide = parts[0].gradient.device, parts[0].gradient.dtype
    copies = [
        replace(
            part,
            moment=part.moment.clone(),
            master=part.master.clone(),
            published=None if part.published is None else part.published.clone(),
        )
        for part in parts
    ]
    table, bad = MuonTable(copies), torch.tensor(is_bad, device=device)
    directions = torch.zeros(3 * sum(SIZES), dtype=muon.direction_dtype(wide), device=device)
    factor = torch.tensor(0.3, dtype=torch.float64, device=device)
    table.write_directions(directions, MOMENTUM, factor=factor, is_bad=bad, form=form)
    updates = torch.linspace(-1, 1, sum(SIZES), dtype=torch.float64, device=device).to(directions.dtype)
    table.step(updates, LR, DECAY, is_bad=bad, form=form)
    states = [[part.moment, part.master, part.published] for part in copies]
    return [directions, *(state for some in states for state in some if state is not None)]


@of_each
def test_a_part_is_averaged_and_stepped_where_its_places_say(kind: str) -> None:
    parts = parts_of(kind, "cpu")
    directions, *states = results(parts, "torch")
    number = len(states) // len(parts)
    for place, part in enumerate(parts):
        size = len(part.gradient)
        gradient = part.gradient * 0.3
        moment, *masters = states[place * number :][:number]
        average = part.moment.to(gradient.dtype).lerp(gradient, 1 - MOMENTUM)
        torch.testing.assert_close(moment, average.to(moment.dtype), rtol=1e-6, atol=1e-7)
        if part.sent is not None:
            own = directions[part.sent : part.sent + size]
            torch.testing.assert_close(own, gradient.lerp(average, MOMENTUM).to(own.dtype), rtol=1e-2, atol=1e-6)
            assert not directions[part.sent + size : part.sent + 2 * size - 1].any(), "nothing else is written"
        update = torch.linspace(-1, 1, sum(SIZES), dtype=torch.float64)[part.returned :][:size]
        before = split.whole_master(part.master, part.published).double()
        expected = before * (1 - LR * part.rate * DECAY * part.decay) - LR * part.rate * 1.5 * update
        after = masters[-1].double() if part.published is not None else masters[0].double()
        torch.testing.assert_close(after, expected, rtol=1e-2, atol=1e-3)


@of_each
def test_a_bad_step_changes_nothing(kind: str) -> None:
    parts = parts_of(kind, "cpu")
    _, *states = results(parts, "csrc", is_bad=1.0)
    before = [[part.moment, part.master, part.published] for part in parts]
    assert all(map(torch.equal, states, [state for some in before for state in some if state is not None]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("is_bad", [0.0, 1.0])
@of_each
def test_kernels_have_the_bits_of_torch(kind: str, is_bad: float) -> None:
    parts, calls = parts_of(kind, "cuda"), native.csrc_calls()
    own, expected = (results(parts, form, is_bad=is_bad) for form in ("csrc", "torch"))
    for number, (mine, plain) in enumerate(zip(own, expected, strict=True)):
        assert torch.equal(mine.view(torch.uint8), plain.view(torch.uint8)), number
    for op in ("muon_direction", "muon_update"):
        assert native.csrc_calls()[op] == calls.get(op, 0) + 1
