"""Programs in which several writers save at once, each of which plays a host of its own, and what they saved goes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ckptkit.format.keys import Seat
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps, pin
from ckptkit.runs.pruning import Pruner, prune
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.small_steps import save_rank, save_ranks
from tests.power_loss.program import LAYOUT, Program, be_host, saved, say, step_fault
from tests.support.checks import require
from threefold.storage import AlreadyExists, open_storage

NEWEST = Retention(keep_last=1)


def save_as(layout: ParallelLayout) -> Callable[[Path], None]:
    """Return what saves two steps by the writers of a layout at once, each of which learns of the commit."""
    num_writers = layout.world_size

    def work(folder: Path) -> None:
        storage = open_storage(str(folder / "run"))

        def save(step: int, rank: int) -> None:
            be_host(f"writer {rank}")
            seat = Seat(storage.address, step, "a", rank, num_writers)
            save_rank(storage, seat, layout, step, patience_s=lambda _: 20.0)
            say(f"whole {step}")

        with ThreadPoolExecutor(num_writers) as pool:
            for step in (1, 2):
                list(pool.map(save, [step] * num_writers, reversed(range(num_writers))))

    return work


def saved_once_more(
    layout: ParallelLayout, steps: Sequence[int] = (1, 2), then: Callable[[Path], object] = lambda _: None
) -> Callable[[Path], None]:
    """Return what a job does that is started after a loss of power: save the steps that lack, by an attempt of its own.

    At the end, and after each step, it does what comes `then`.
    """

    def work(folder: Path) -> None:
        storage = open_storage(str(folder / "run"))
        newest = max(committed_steps(storage) if (folder / "run").exists() else [], default=0)
        for step in steps:
            if step > newest:
                save_ranks(storage, step, "c", layout, step)
                say(f"whole {step}")
                then(folder)
        then(folder)

    return work


def save_and_prune(folder: Path) -> None:
    """Save four steps by eight writers, none of which waits for another but at the commit; the first prunes."""
    storage, pruner = open_storage(str(folder / "run")), Pruner()

    def save(rank: int) -> None:
        be_host(f"writer {rank}")
        for step in FOUR_STEPS:
            seat = Seat(storage.address, step, "a", rank, EIGHT.world_size)
            save_rank(storage, seat, EIGHT, step, patience_s=lambda _: 20.0)
            say(f"newest {step}")
            if rank == 0:
                warning = pruner.after_save(storage, step, NEWEST)
                require(not warning, warning)

    with ThreadPoolExecutor(EIGHT.world_size) as pool:
        list(pool.map(save, reversed(range(EIGHT.world_size))))


def save_and_prune_as_two_jobs(folder: Path) -> None:
    """Save three steps by two jobs at once, with four writers each; whose step was committed prunes the run."""
    storage = open_storage(str(folder / "run"))

    def save(step: int, attempt: str, rank: int) -> None:
        be_host(f"writer {rank} of {attempt}")
        try:
            seat = Seat(storage.address, step, attempt, rank, FOUR.world_size)
            save_rank(storage, seat, FOUR, step, patience_s=lambda _: 20.0)
        except AlreadyExists:
            return
        say(f"newest {step}")
        if rank == 0:
            warning = Pruner().after_save(storage, step, NEWEST)
            require(not warning, warning)

    with ThreadPoolExecutor(2 * FOUR.world_size) as pool:
        for step in THREE_STEPS:
            jobs = [(attempt, rank) for rank in reversed(range(FOUR.world_size)) for attempt in "ab"]
            list(pool.map(lambda job, step=step: save(step, *job), jobs))


def keep_newest(folder: Path) -> None:
    """Delete all steps but the newest, and those that are pinned."""
    prune(open_storage(str(folder / "run")), NEWEST)


def pruned(folder: Path) -> None:
    """Do so, and say it."""
    keep_newest(folder)
    say("pruned")


def saved_by_eight(folder: Path) -> None:
    """Make a run of four steps of eight writers each, of which the second is pinned."""
    storage = open_storage(str(folder / "run"))
    for step in FOUR_STEPS:
        save_ranks(storage, step, "a", EIGHT, step)
    pin(storage, 2, "kept")


def saved_by_four(folder: Path) -> None:
    """Make a run of three steps of four writers each."""
    storage = open_storage(str(folder / "run"))
    for step in (2, 3, 4):
        save_ranks(storage, step, "a", FOUR, step)


def newest_step_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a run of which the newest step that was promised, or a later one, must load."""
    if fault := step_fault(folder, ()):
        return fault
    steps = committed_steps(open_storage(str(folder / "run"))) if (folder / "run").exists() else []
    newest = max((int(text.split()[1]) for text in promises), default=0)
    return f"step {newest} was promised, and nothing is newer" if max(steps, default=0) < newest else ""


RUN, THREE_STEPS, FOUR_STEPS = ("run",), (1, 2, 3), (1, 2, 3, 4)
FOUR, EIGHT = ParallelLayout(tp=2, pp=2), ParallelLayout(tp=4, pp=2)
WRITER_PROGRAMS = {
    "save": Program(save_as(LAYOUT), step_fault, again=saved_once_more(LAYOUT), runs=RUN),
    "four writers": Program(save_as(FOUR), partial(step_fault, layout=FOUR), again=saved_once_more(FOUR), runs=RUN),
    "eight writers": Program(save_as(EIGHT), step_fault, again=saved_once_more(EIGHT), runs=RUN),
    "retention": Program(
        save_and_prune, newest_step_fault, again=saved_once_more(EIGHT, FOUR_STEPS, then=keep_newest), runs=RUN
    ),
    "two jobs that prune": Program(
        save_and_prune_as_two_jobs,
        newest_step_fault,
        again=saved_once_more(FOUR, THREE_STEPS, then=keep_newest),
        runs=RUN,
    ),
    "prune": Program(pruned, step_fault, saved(1, 2, 3), ("whole 3",), runs=RUN),
    "prune of four": Program(pruned, step_fault, saved_by_four, ("whole 4",), runs=RUN),
    "prune of eight": Program(pruned, step_fault, saved_by_eight, ("whole 2", "whole 4"), runs=RUN),
}
