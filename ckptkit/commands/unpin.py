"""`ckptkit unpin`: take a pin away."""

from dataclasses import dataclass

from ckptkit.commands.shared import OfSteps, each_step


@dataclass(frozen=True, kw_only=True)
class Options(OfSteps):
    """Options of `ckptkit unpin`."""


def run(options: Options) -> None:
    """Take the pins of steps away."""
    from ckptkit.format.address import open_address
    from ckptkit.runs.catalogue import unpin

    each_step(options, "unpinned", open_address, unpin)  # also of a step whose root is gone
