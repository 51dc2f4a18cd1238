"""What a test knows of a run: its steps, those that a policy keeps, and the faults of its storage."""

from dataclasses import dataclass

from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.retention import Retention
from tests.ckptkit.support.programs import Killed
from threefold.errors import StorageError
from threefold.storage import Storage, TemporaryFailure
from threefold.storage.fault import Fault, FaultStorage


@dataclass
class Step:
    """What the dict knows of a committed step."""

    value: int
    layout: ParallelLayout
    is_pinned: bool = False


class Dead(FaultStorage):
    """A storage of which nothing more is heard once a request was met by the kill."""

    def __init__(self, storage: Storage, after: int, *, served: bool) -> None:
        super().__init__(storage, Fault(Killed(), after=after, times=1, served=served), Fault(Killed(), after=after))


def faulty(storage: Storage, fault: tuple[str, int, bool, int]) -> Storage:
    kind, after, served, times = fault
    if kind == "killed":
        return Dead(storage, after, served=served)
    error = StorageError("refused") if kind == "refused" else TemporaryFailure("busy")
    return FaultStorage(storage, Fault(error, after=after, times=times, served=served))


def kept_steps(steps: dict[int, Step], policy: Retention) -> set[int]:
    """The steps that a policy keeps, said once more: the newest, the pinned, the last, the first of each multiple."""
    ascending = sorted(steps)
    stay = {step for step in ascending if steps[step].is_pinned} | set(ascending[-1:])
    stay |= set(ascending[-policy.keep_last :] if policy.keep_last else ())
    for step in ascending if policy.keep_every else ():
        first = next(each for each in ascending if each // policy.keep_every == step // policy.keep_every)
        stay |= {first} if first >= policy.keep_every else set()
    return stay
