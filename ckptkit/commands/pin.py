"""`ckptkit pin`: keep a step from being pruned."""

from dataclasses import dataclass
from functools import partial

from ckptkit.commands.shared import OfSteps, each_step
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfSteps):
    """Options of `ckptkit pin`."""

    note: str = option("", "why, for `ckptkit ls --json`")


def run(options: Options) -> None:
    """Pin steps: no retention policy deletes them, whatever it asks."""
    from ckptkit.runs.catalogue import pin
    from ckptkit.runs.run import resolve

    each_step(options, "pinned", resolve, partial(pin, note=options.note))
