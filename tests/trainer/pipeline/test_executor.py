"""One rank's row against a neighbour that is only pretended: what is called, in which order, and what is kept."""

import weakref
from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Wgrads
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group
from trainer.pipeline.actions import Action
from trainer.pipeline.executor import Executor
from trainer.pipeline.schedules import forward_only, gpipe, one_f_one_b, with_transfers, zb_h1

WIDTH, NUM_MICROBATCHES, MAX_SENDS = 3, 6, 2


class Neighbour:
    """A transport whose other end is always there: it sends ones, and counts what is under way."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: list[Tensor] = []
        self.under_way = 0

    def send(self, tensor: Tensor, to: int) -> "Transfer":
        self.calls.append("send")
        self.sent.append(tensor.clone())
        self.under_way += 1
        return Transfer(self, None)

    def receive(self, tensor: Tensor, source: int) -> "Transfer":
        self.calls.append("receive")
        return Transfer(self, tensor)


class Transfer:
    def __init__(self, neighbour: Neighbour, buffer: Tensor | None) -> None:
        self.neighbour, self.buffer = neighbour, buffer

    def wait(self) -> None:
        if self.buffer is None:
            self.neighbour.under_way -= 1
        else:
            self.neighbour.calls.append("wait")
            self.buffer.fill_(1)


def executor_with(neighbour: Any) -> Executor[Tensor]:
    link = Group("link", (0, 1), 0, Clock(torch.device("cpu")), neighbour)
    return Executor(lambda action: link, lambda: torch.full((WIDTH,), torch.nan), Wgrads(), max_sends=MAX_SENDS)


def batches() -> list[Tensor]:
    return [torch.arange(WIDTH) + float(m) for m in range(NUM_MICROBATCHES)]


def test_stages_of_one_rank_hand_their_tensors_on() -> None:
    weights = [torch.full((WIDTH,), value, requires_grad=True) for value in (2.0, 3.0)]
    chunks = {
        0: lambda received, batch: weights[0] * batch,
        1: lambda received, batch: (weights[1] * received).square().sum(),
    }
    row = []
    for m in range(NUM_MICROBATCHES):
        row += [Action("F", 0, m), Action("F", 1, m), Action("B", 1, m), Action("B", 0, m)]
    executor = executor_with(None)
    losses = executor.run(row, chunks, batches())
    gradients = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    expected = [(weights[1] * weights[0] * batch).square().sum() for batch in batches()]
    for loss in expected:
        loss.backward()
    assert losses == expected
    assert all(torch.equal(gradient, weight.grad) for gradient, weight in zip(gradients, weights, strict=True))
    assert (executor.peak_live, executor.peak_sends) == (2, 0)


def test_a_middle_rank_posts_receives_ahead_and_sends_what_its_passes_made() -> None:
    neighbour, weight = Neighbour(), torch.tensor(2.0, requires_grad=True)
    executor = executor_with(neighbour)
    row = with_transfers(one_f_one_b(3, 2), ahead=1)[1]
    assert " ".join(map(str, row)) == "RF0 RF1 F0 SF0 RB0 F1 SF1 RB1 B0 SB0 B1 SB1"
    assert executor.run(row, {1: lambda received, batch: received * weight}, batches()[:2]) == []
    calls = "receive receive wait send receive wait send receive wait send wait send"
    assert neighbour.calls == calls.split(), "a pass waits for its own receive"
    assert [tensor.tolist() for tensor in neighbour.sent] == [[2.0] * WIDTH] * 4
    assert weight.grad == 2 * WIDTH
    assert neighbour.under_way == 0, "all sends are waited for"


def test_outputs_are_freed_once_sent_and_few_sends_are_under_way() -> None:
    weight, neighbour = torch.ones(WIDTH, requires_grad=True), Neighbour()
    outputs: list[weakref.ref] = []
    most_under_way = most_alive = 0

    def chunk(received: Tensor | None, batch: Tensor) -> Tensor:
        nonlocal most_under_way, most_alive
        most_under_way = max(most_under_way, neighbour.under_way)
        most_alive = max(most_alive, sum(output() is not None for output in outputs))
        out = weight * batch + batch
        outputs.append(weakref.ref(out))
        return out

    executor = executor_with(neighbour)
    assert executor.run(with_transfers(gpipe(2, NUM_MICROBATCHES))[0], {0: chunk}, batches()) == []
    assert torch.equal(weight.grad, sum(batches(), torch.zeros(WIDTH))), "each output's graph was kept"
    assert len(outputs) == executor.peak_live == NUM_MICROBATCHES
    assert most_under_way == executor.peak_sends == MAX_SENDS
    assert most_alive == 0, "what is kept is what is being sent"


def test_without_backward_passes_nothing_is_kept_for_them() -> None:
    neighbour, weight = Neighbour(), torch.ones(WIDTH, requires_grad=True)
    executor = executor_with(neighbour)
    with torch.no_grad():
        row = with_transfers(forward_only(2, NUM_MICROBATCHES))[1]
        losses = executor.run(row, {1: lambda received, batch: (received * weight * batch).sum()}, batches())
    assert losses == [batch.sum() for batch in batches()]
    assert executor.peak_live == 0
    assert "send" not in neighbour.calls


def test_products_of_a_backward_pass_are_made_at_its_w() -> None:
    numbers: list[int] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
            ctx.number = number
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
            executor.wgrads.add(lambda: numbers.append(ctx.number))
            return dy, None

    counts: list[int] = []

    def chunk(received: Tensor | None, batch: Tensor) -> Tensor:
        counts.append(len(numbers))
        return Product.apply(received, int(batch[0])).sum()

    executor = executor_with(Neighbour())
    row = with_transfers(zb_h1(2, 3), None)[1]
    assert " ".join(map(str, row)) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1 RF2 W0 F2 B2 SB2 W1 W2"
    executor.run(row, {1: chunk}, batches()[:3])
    assert numbers == [0, 1, 2]
    assert counts == [0, 0, 1], "W0 comes before F2"
    assert executor.peak_live == 2
    executor.wgrads.add(lambda: numbers.append(3))
    assert numbers == [0, 1, 2, 3], "outside a backward pass that puts off, at once"
