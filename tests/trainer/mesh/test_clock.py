"""The clock of waits: what it counts, and on a GPU the waits in the passes of one micro-batch for all."""

import pytest
import torch

from trainer.mesh import clock as clocks
from trainer.mesh.clock import Clock


class Marked:
    """A moment of a GPU that is the number of moments before it."""

    count, is_real = 0, True

    def __init__(self, _device: torch.device) -> None:
        self.number = Marked.count
        Marked.count += 1

    def seconds_since(self, earlier: "Marked") -> float:
        return float(self.number - earlier.number)


@pytest.mark.parametrize(("device", "counted", "moments"), [("cuda", 4.0, 2), ("cpu", 4.0, 8)])
def test_waits_of_one_pass_stand_for_all_on_a_gpu(
    device: str, counted: float, moments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "Moment", Marked)
    clock = Clock(torch.device(device))
    before, timed = Marked.count, []
    for microbatch in range(4):
        with clock.sampling(4 if microbatch == 2 else 0), clock.span("comm_tp", is_sampled=True) as is_timed:
            timed.append(is_timed)
    assert Marked.count - before == moments
    assert timed == ([False, False, True, False] if device == "cuda" else [True] * 4)
    with clock.span("comm_tp", is_sampled=True), clock.span("bubble"):
        pass
    assert clock.take()() == {"comm_tp": counted + 3, "bubble": 1.0}
    assert clock.take()() == {}


def test_what_is_not_sampled_is_counted_in_each_pass_and_what_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "Moment", Marked)
    clock = Clock(torch.device("cuda"))
    for times in (0, 2):
        with clock.sampling(times), clock.span("comm_dp"):
            pass
    with pytest.raises(RuntimeError, match="lost"), clock.sampling(0), clock.span("comm_dp"):
        raise RuntimeError("lost")
    with clock.span("comm_tp", is_sampled=True) as is_timed:
        assert is_timed, "outside of passes"
    assert clock.take()() == {"comm_dp": 2.0, "comm_tp": 1.0}
