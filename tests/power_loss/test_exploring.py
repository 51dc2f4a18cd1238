"""What looks at a tree sees other values, other debris and other ends than those that are right."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.small_steps import save_ranks
from tests.power_loss import exploring
from tests.power_loss.exploring import fault_of, in_one_thread, names_of, recorded
from tests.power_loss.folder_programs import torch_fault
from tests.power_loss.program import Program, step_fault
from tests.support.strace import needs_strace
from threefold.storage import open_storage
from tools.power_loss.disk import Recording, replay

LAYOUT = ParallelLayout(tp=2)


def run_of(folder: Path, attempt: str, *values: int) -> Path:
    """Make a run whose steps, from 1 on, have values."""
    for step, value in enumerate(values, 1):
        save_ranks(open_storage(str(folder / "run")), step, attempt, LAYOUT, value)
    return folder


def test_a_step_that_was_whole_is_looked_at_once_more_when_a_byte_of_it_differs(tmp_path: Path) -> None:
    assert step_fault(run_of(tmp_path, "a", 1), ("whole 1",)) == ""
    part = next((tmp_path / "run").rglob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert step_fault(tmp_path, ()) == "step 1 is committed: DamagedGranule"
    assert step_fault(run_of(tmp_path / "other", "a", 2), ()) == "step 1 has the values of step 2"


def test_what_another_attempt_leaves_is_debris_unless_the_first_left_as_much(tmp_path: Path) -> None:
    left = ["run", "run/step-000000001/a", "run/step-000000001/a/part"]
    assert names_of(left) == names_of(path.replace("/a", "/c") for path in left)
    assert [*names_of([*left, "run/step-000000001/c"]) - names_of(left)] == ["run/step-000000001/*"]
    program = Program(lambda _: None, lambda folder, promises: "", runs=("run",))
    run_of(tmp_path, "a", 1)
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert fault_of(program, names, tmp_path, ()) == ""
    assert fault_of(program, names[:-1], tmp_path, ()) == f"once more: {next(iter(names_of(names[-1:])))} is left"
    assert fault_of(program, [], tmp_path, (), once_more=False) == ""


def test_pools_do_their_work_in_the_thread_that_gives_it() -> None:
    with in_one_thread(), ThreadPoolExecutor(2) as pool:
        assert {*pool.map(lambda _: threading.get_ident(), range(4))} == {threading.get_ident()}
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()


@needs_strace
@pytest.mark.slow
@pytest.mark.ci
def test_a_replay_that_ends_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*words: object) -> Recording:
        made = replay(*words)
        return replace(made, changes=made.changes[:-1])

    monkeypatch.setattr(exploring, "replay", short)
    with pytest.raises(AssertionError, match="a replay of store does not end as it did"), recorded("store"):
        pass


@pytest.mark.slow
@pytest.mark.ci
def test_other_values_of_a_torch_program_are_seen(tmp_path: Path) -> None:
    import torch

    from ckptkit.torch import Run

    with Run(str(tmp_path / "run")) as run:
        for step, scale in ((1, 1), (2, 3)):
            run.save(step, {"weight": torch.arange(3000.0) * scale, "step": step})
            run.wait()
    assert torch_fault(tmp_path, ()) == "step 2 is committed: AssertionError"
