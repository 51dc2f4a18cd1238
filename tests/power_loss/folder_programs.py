"""Further programs on runs: pins, tiers, two jobs at once, and folders of other programs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptkit.check.hash import hash_checkpoint
from ckptkit.foreign.dcp.export import export_dcp
from ckptkit.foreign.folder import import_folder
from ckptkit.foreign.kinds import folder_of
from ckptkit.format.keys import Seat
from ckptkit.loading.reader import CheckpointReader
from ckptkit.runs.catalogue import committed_steps, pin, pin_note, unpin
from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.tiers.tier import Tier
from tests.ckptkit.support.saves import SMALL, assert_holds, save_one
from tests.ckptkit.support.small_steps import save_rank
from tests.power_loss.program import LAYOUT, Program, be_host, saved, say, step_fault
from tests.support.checks import require
from threefold.errors import UserError
from threefold.storage import AlreadyExists, open_storage

RUN = ("run",)


def pinned(folder: Path) -> None:
    """Pin a step."""
    pin(open_storage(str(folder / "run")), 1, "kept")
    say("pinned 1")


def unpinned(folder: Path) -> None:
    """Take a pin away."""
    unpin(open_storage(str(folder / "run")), 1)
    say("unpinned 1")


def pin_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a run, or with a pin that was put or taken away."""
    note = pin_note(open_storage(str(folder / "run")), 1)
    wrong = note != "kept" if "pinned 1" in promises else "unpinned 1" in promises and note is not None
    return f"the pin is {note}" if wrong else step_fault(folder, promises)


def save_as_two_jobs(folder: Path) -> None:
    """Save two steps by two jobs at once, of which one commits each, with two writers."""
    storage = open_storage(str(folder / "run"))

    def save(step: int, attempt: str, rank: int) -> None:
        be_host(f"writer {rank} of {attempt}")
        seat = Seat(storage.address, step, attempt, rank, 2)
        try:
            save_rank(storage, seat, LAYOUT, step, patience_s=lambda _: 20.0)
        except AlreadyExists:
            return
        say(f"whole {step}")

    with ThreadPoolExecutor(4) as pool:
        for step in (1, 2):
            jobs = [(attempt, rank) for attempt in "ab" for rank in (1, 0)]
            list(pool.map(lambda job, step=step: save(step, *job), jobs))


def save_as_two_checkpointers(folder: Path) -> None:
    """Save two steps by the Checkpointers of two ranks, each of which learns of the commit."""

    def save(rank: int) -> None:
        with Checkpointer(str(folder / "run"), rank=rank, world_size=2, attempt="a") as checkpointer:
            for step in (1, 2):
                save_one(checkpointer, step, SMALL, LAYOUT, rank, scale=step)
                if all(report.ok for report in checkpointer.wait()):
                    say(f"fast {step}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (1, 0)))


def save_of_torch(folder: Path) -> None:
    """Save two steps of a PyTorch program, by Run.save."""
    import torch

    from ckptkit.torch import Run

    with Run(str(folder / "run")) as run:
        for step in (1, 2):
            run.save(step, {"weight": torch.arange(3000.0) * step, "step": step})
            if all(report.ok for report in run.wait()):
                say(f"saved {step}")


def torch_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with the steps of Run.save."""
    import torch

    from ckptkit.torch import Run

    steps = committed_steps(open_storage(str(folder / "run"))) if (folder / "run").exists() else []
    sure = {int(text.split()[1]) for text in promises}
    for step in sorted(sure | {*steps}):
        state = {"weight": torch.zeros(3000), "step": 0}
        try:
            with Run(str(folder / "run")) as run:
                run.load(state, step=step)
            is_whole = torch.equal(state["weight"], torch.arange(3000.0) * step) and state["step"] == step
            require(is_whole, f"step {step} has other values")
        except (UserError, AssertionError) as error:
            return f"step {step} {'was promised' if step in sure else 'is committed'}: {type(error).__name__}"
    return ""


def save_to_two_tiers(folder: Path) -> None:
    """Save two steps, each of which is copied to a slower place; the copy is awaited."""
    options = CheckpointerOptions(60.0, tiers=(Tier(str(folder / "slow")),))
    with Checkpointer(str(folder / "run"), attempt="a", options=options) as checkpointer:
        for step in (1, 2):
            save_one(checkpointer, step, SMALL, scale=step)
            if all(report.ok for report in checkpointer.wait()):
                say(f"fast {step}")
        for report in checkpointer.close():
            if report.ok and report.url.endswith("/slow"):
                say(f"slow {report.step}")


def tier_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with the steps of two places."""
    for word, name in (("fast", "run"), ("slow", "slow")):
        steps = committed_steps(open_storage(str(folder / name))) if (folder / name).exists() else []
        sure = {int(text.split()[1]) for text in promises if text.startswith(word)}
        for step in sorted(sure | {*steps}):
            try:
                assert_holds(str(folder / name), step, SMALL, scale=step)
            except (UserError, AssertionError) as error:
                said = "was promised" if step in sure else "is committed"
                return f"{word} step {step} {said}: {type(error).__name__}"
    return ""


def exported(folder: Path) -> None:
    """Write a step as a folder of torch.distributed.checkpoint."""
    with CheckpointReader(open_storage(str(folder / "run")), 1) as source:
        export_dcp(source, open_storage(str(folder / "out")), kind="dcp", max_shard_bytes=300)
    say("folder out")


def imported(folder: Path) -> None:
    """Write a folder of torch.distributed.checkpoint as a step of another run."""
    import_folder(folder_of("dcp", str(folder / "out")), open_storage(str(folder / "copies")), step=1)
    say("copied 1")


def digests(folder: Path, name: str) -> dict[str, str]:
    """Return the digests of the tensors of a folder of torch.distributed.checkpoint, or of step 1 of a run."""
    if name == "out":
        source = folder_of("dcp", str(folder / name))
        with source.open(source.resolve()) as reader:
            return hash_checkpoint(reader).tensors
    with CheckpointReader(open_storage(str(folder / name)), 1) as reader:
        return hash_checkpoint(reader).tensors


def folder_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a folder, or a run, that was made of the run's step: other values, or nothing."""
    expected = digests(folder, "run")
    for name, promise in (("out", "folder out"), ("copies", "copied 1")):
        try:
            values = digests(folder, name)
        except (UserError, AssertionError) as error:
            if promise in promises:
                return f"{name} was promised: {type(error).__name__}"
            continue
        if values != expected:
            return f"{name} has other values"
    return ""


FOLDER_PROGRAMS = {
    "pin": Program(pinned, pin_fault, saved(1, 2), ("whole 1", "whole 2"), runs=RUN),
    "unpin": Program(unpinned, pin_fault, saved(1, 2, then=pinned), ("whole 1", "whole 2"), runs=RUN),
    "two jobs": Program(save_as_two_jobs, step_fault, is_repeatable=False),
    "two checkpointers": Program(save_as_two_checkpointers, tier_fault, is_repeatable=False),
    "torch": Program(save_of_torch, torch_fault, is_repeatable=False),
    "tiers": Program(save_to_two_tiers, tier_fault, is_repeatable=False),
    "export": Program(exported, folder_fault, saved(1), runs=RUN),
    "import": Program(
        imported, folder_fault, saved(1, then=exported), ("folder out",), is_repeatable=False, runs=("run", "copies")
    ),
}
