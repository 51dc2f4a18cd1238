"""`ckptkit pin`: keep a step from being pruned."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.commands.shared import OfSteps, each_step
from threefold.options import option

if TYPE_CHECKING:
    from threefold.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Options(OfSteps):
    """Options of `ckptkit pin`."""

    note: str = option("", "why, for `ckptkit ls --json`")


def run(options: Options) -> int:
    """Pin steps: no retention policy deletes them, whatever it asks."""
    from ckptkit.runs.catalogue import resolve
    from ckptkit.runs.pins import pin

    def act(storage: "Storage", step: int) -> bool:
        pin(storage, step, options.note)
        return True

    return each_step(options, "pinned", resolve, act)
