"""Saves with overlap: what is copied late is what an optimizer of the state owns, and a change of it fails the step."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.saving.running_save import CallerThread
from ckptkit.saving.staging import Staging
from ckptkit.torch import Run
from tests.ckptkit.support.torch_program import batch, make
from tests.trainer.support.ranks import run_ranks
from threefold.errors import StorageError

State = dict[str, Any]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event that all copies of overlapped saves wait for."""
    may_copy, copy = threading.Event(), Staging._copy

    def waiting(self: Staging, part: slice) -> None:
        may_copy.wait(60)
        copy(self, part)

    monkeypatch.setattr(Staging, "_copy", waiting)
    yield may_copy
    may_copy.set()


def program(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def frozen(module: nn.Module) -> State:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Swapping(torch.optim.SGD):
    """An optimizer of two sets of weights, as schedule-free ones are."""

    def train(self) -> None: ...

    def eval(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


def ema(state: State) -> Callable[[], object]:
    state["ema"] = torch.optim.swa_utils.AveragedModel(state["model"])
    with torch.no_grad():
        for parameter in state["ema"].parameters():
            parameter.zero_()
    state["ema"].n_averaged += 1
    return lambda: state["ema"].update_parameters(state["model"])


def target_network(state: State) -> Callable[[], object]:
    state["target"] = nn.Linear(4, 4)
    return lambda: state["target"].load_state_dict(state["model"][0].state_dict())


def another_optimizer(state: State) -> Callable[[], object]:
    state["head"] = nn.Linear(4, 4)
    state["head"].weight.grad = torch.ones(4, 4)
    return torch.optim.SGD(state["head"].parameters(), lr=1.0).step


def frozen_part(state: State) -> Callable[[], object]:
    [first, second] = state["model"]
    state["optimizer"] = torch.optim.SGD(first.parameters(), lr=0.1)
    return lambda: nn.init.zeros_(second.weight)


OTHERS = [ema, target_network, another_optimizer, frozen_part]


@pytest.mark.parametrize("of", OTHERS, ids=[each.__name__ for each in OTHERS])
def test_what_no_optimizer_of_the_state_owns_is_saved_as_it_was(
    of: Callable[[State], Callable[[], object]], copies: threading.Event, tmp_path: Path
) -> None:
    state = program()
    change = of(state)
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    expected = {key: frozen(module) for key, module in modules.items()}
    with Run(tmp_path) as run:
        run.save(1, state, overlap=True)
        change()
        assert any(
            not torch.equal(value, module.state_dict()[name])
            for key, module in modules.items()
            for name, value in expected[key].items()
        )
        copies.set()
        run.load(modules)
    for key, module in modules.items():
        torch.testing.assert_close(frozen(module), expected[key], rtol=0, atol=0)


def test_an_optimizer_that_swaps_weights_is_copied_at_once(copies: threading.Event, tmp_path: Path) -> None:
    state = program(Swapping, momentum=0.9)
    expected = frozen(state["model"])
    with Run(tmp_path) as run:
        run.save(1, state, overlap=True)
        state["optimizer"].eval()
        state["optimizer"].state[state["model"][0].weight]["momentum_buffer"].zero_()
        copies.set()
        run.load(state)
    torch.testing.assert_close(frozen(state["model"]), expected, rtol=0, atol=0)
    assert state["optimizer"].state[state["model"][0].weight]["momentum_buffer"].any()


def test_a_learning_rate_that_is_a_tensor_is_saved_as_it_was(copies: threading.Event, tmp_path: Path) -> None:
    state = program(torch.optim.AdamW)
    rate = state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.25)
    with Run(tmp_path) as run:
        run.save(1, state, overlap=True)
        rate.fill_(0.125)  # as a scheduler does
        copies.set()
        run.load(state)
    assert rate == 0.25


def clip(state: State) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.clamp_(-0.1, 0.1)


def reset_moments(state: State) -> None:
    for each in state["optimizer"].state.values():
        each["exp_avg"].zero_()


CHANGES = [
    (clip, "model/0.weight and 3 more changed while overlap=True copied it"),
    (reset_moments, "optimizer/state/0.weight/exp_avg and 3 more changed"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=["weights", "moments"])
def test_a_change_before_the_optimizers_step_fails_the_save_by_name(
    change: Callable[[State], None], message: str, copies: threading.Event, tmp_path: Path
) -> None:
    state = program(torch.optim.AdamW)
    with Run(tmp_path) as run:
        run.save(1, state, overlap=True)
        change(state)
        copies.set()
        with pytest.raises(StorageError, match=f"step 1: rank 0: {message}"):
            run.wait()
        assert run.steps() == []
        run.save(1, state, overlap=True)
        run.wait_until_copied()
        change(state)
        assert [report.ok for report in run.wait()] == [True]


def test_optimizers_wait_for_the_copies_of_what_they_own(copies: threading.Event, tmp_path: Path) -> None:
    state = program(torch.optim.AdamW)
    expected = frozen(state["model"])
    with Run(tmp_path) as run:
        run.save(1, state, overlap=True)
        threading.Timer(0.1, copies.set).start()
        state["optimizer"].step()
        assert not torch.equal(state["model"][0].weight, expected["0.weight"])
        [report] = run.wait()
        assert report.ok
        run.load(state)
    torch.testing.assert_close(frozen(state["model"]), expected, rtol=0, atol=0)


def test_a_thread_is_asked_once_it_has_left_what_it_was_doing() -> None:
    caller, left = CallerThread(), threading.Event()

    def ask() -> None:
        caller.await_move(threading.Event())
        left.set()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.05)  # one call, however long it takes
    for _ in range(1000):
        if left.wait(0.01):
            break
    assert left.is_set()
    thread.join()


def sharded_program(rank: int, url: str, layout: str) -> list[str]:
    model, optimizer, _ = make(layout)
    averaged = torch.optim.swa_utils.AveragedModel(model) if layout == "ddp" else None
    state = {"model": model, "optimizer": optimizer} | ({"ema": averaged} if averaged else {})
    messages = []
    with Run(url) as run:
        for step in range(1, 4):
            run.save(step, state, overlap=True)
            if averaged:
                averaged.update_parameters(model)
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            messages += [report.error for report in run.wait()]
    return messages


def bytes_of_matrices(data: Path) -> int:
    """Return the bytes in a data file of what is of the shape of a weight or a bias."""
    text = data.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items() if name.partition("@")[0].endswith(("weight", "bias", "avg", "sq"))
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.ci), "fsdp", "tp"])
def test_a_forward_and_a_backward_of_any_wrapper_change_nothing(layout: str, tmp_path: Path) -> None:
    assert run_ranks(2, sharded_program, str(tmp_path), layout) == [["", "", ""]] * 2
    sizes = [bytes_of_matrices(data) for data in tmp_path.glob("step-000000003/*/*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)  # what all ranks have is written by each in part, late or not


def change_of_a_dtensor(rank: int, url: str) -> list[str]:
    model, optimizer, _ = make("fsdp")
    messages = []
    with Run(url) as run:
        for step, weight in enumerate((model[0].weight, model[0].weight.to_local())):
            copy = Staging._copy
            changed = threading.Event()

            def waiting(
                self: Staging, part: slice, changed: threading.Event = changed, copy: Callable[..., None] = copy
            ) -> None:
                changed.wait(60)
                copy(self, part)

            Staging._copy = waiting  # type: ignore[method-assign]
            run.save(step, {"model": model, "optimizer": optimizer}, overlap=True)
            with torch.no_grad():
                weight.mul_(2)
            changed.set()
            try:
                run.wait()
            except StorageError as error:
                messages.append(str(error))
            Staging._copy = copy  # type: ignore[method-assign]
    return messages


@pytest.mark.ci
@pytest.mark.slow
def test_a_change_of_a_dtensor_or_of_its_part_here_is_seen(tmp_path: Path) -> None:
    for said in run_ranks(2, change_of_a_dtensor, str(tmp_path)):
        assert ["model/0.weight changed" in each for each in said] == [True, True]
