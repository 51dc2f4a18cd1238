"""A node that fails to save: what the others keep for it, and what is saved again."""

from contextlib import suppress
from pathlib import Path

from ckptkit import Retention
from ckptkit.format.keys import step_folder
from ckptkit.torch import Run
from tests.ckptkit.support.node_job import Job, state_of
from threefold.errors import StorageError


def test_a_node_keeps_the_newest_step_that_all_hold_while_another_fails_to_save(tmp_path: Path) -> None:
    job = Job(tmp_path, replica=False)

    def save(run: Run, rank: int) -> None:
        run.save(2, state_of(rank, 2))
        run.wait()
        for step in (4, 6):
            (job.disk("n1") / f"step-{step:09d}").touch()  # so that no folder can be made there
            run.save(step, state_of(rank, step))
            with suppress(StorageError):
                run.wait()

    job.run(save, retention=Retention(keep_last=1), max_failed_saves=5)
    assert job.steps() == [[2, 6], [2]]
    for step in (4, 6):
        (job.disk("n1") / f"step-{step:09d}").unlink()
    assert job.load()[0].step == 2


def test_a_step_that_was_rolled_back_to_stays_while_a_node_fails_to_save(tmp_path: Path) -> None:
    job = Job(tmp_path, (1, 1), replica=False)

    def save(run: Run, rank: int) -> None:
        for step in (2, 4):
            run.save(step, state_of(rank, step))
            run.wait()
        run.save(6, state_of(rank, 6))
        run.rollback(4, dry_run=True)
        assert run.whole_step == 4
        assert run.rollback(4).set_aside == [6]  # also that of a save that ran
        (job.disk("n1") / step_folder(8)).touch()
        run.save(8, state_of(rank, 8))
        with suppress(StorageError):
            run.wait()

    job.run(save, retention=Retention(keep_last=1))
    assert job.steps() == [[4, 8], [4]]


def test_a_start_that_loads_nothing_keeps_the_newest_whole_step_while_a_node_fails_to_save(tmp_path: Path) -> None:
    job = Job(tmp_path, (1, 1), replica=False)
    job.save(1)
    (job.disk("n1") / step_folder(2)).touch()

    def save(run: Run, rank: int) -> None:
        run.save(2, state_of(rank, 2))
        with suppress(StorageError):
            run.wait()

    job.run(save, retention=Retention(keep_last=1))
    assert job.steps() == [[1, 2], [1]]


def test_a_step_that_one_node_did_not_save_is_not_saved_and_can_be_saved_again(tmp_path: Path) -> None:
    job = Job(tmp_path, (1, 1), replica=False)
    in_the_way = job.disk("n1") / step_folder(2)

    def work(run: Run, rank: int) -> list[bool]:
        run.save(1, state_of(rank, 1))
        answers = [run.has_saved(1)]
        if rank == 1:
            in_the_way.write_text("")
        run.has_saved(1)
        for _ in range(2):
            run.save(2, state_of(rank, 2))
            answers.append(run.has_saved(2))
            with suppress(StorageError):
                run.wait()
            if rank == 1 and in_the_way.is_file():
                in_the_way.unlink()
        return answers

    assert job.run(work) == [[True, False, True]] * 2
    assert [report.step for report in job.load()] == [2, 2]
