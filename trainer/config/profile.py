"""Which steps of a run are profiled, and where that goes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from threefold.needs import GIVEN
from threefold.options import Fault, option


def range_of(text: str) -> str:
    """Return a range of steps as FIRST-LAST; ValueError says what it must be."""
    steps = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if text and (steps is None or not 1 <= int(steps[1]) <= int(steps[2] or steps[1])):
        raise ValueError("FIRST-LAST, steps counted from 1, as in 10-12, or one of them")
    return text if steps is None else f"{int(steps[1])}-{int(steps[2] or steps[1])}"


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """`[profile]`: where the time of some steps goes, and their memory."""

    step_range: str = option(
        "",
        "profile these steps, as 10-12: a trace for a browser, a table by kind of kernel, and ranges of stages, "
        "micro-batches and layers, a file each for each rank",
        metavar="FIRST-LAST",
        parse=range_of,
        flags=["--profile-step-range"],
    )
    path: str = option(
        "profile", "folder of what was profiled", flags=["--profile-output-path"], needs={"step_range": GIVEN}
    )
    nvtx: bool = option(
        False,
        "mark stages, micro-batches and layers of all steps by NVTX, for nsys and ncu",
        shorthands={"--nvtx-ranges": "true"},
    )

    @property
    def steps(self) -> range:
        """Return the steps that are profiled, counted from 1."""
        first, _, last = self.step_range.partition("-")
        return range(int(first), int(last) + 1) if self.step_range else range(0)


def profile_faults(profile: ProfileConfig, last: int) -> Iterator[Fault]:
    """Yield a fault where the range is not one, or is behind the last step."""
    try:
        range_of(profile.step_range)
    except ValueError as reason:
        yield {"profile.step_range"}, f"profile.step_range must be {reason}, got {profile.step_range!r}"
        return
    if profile.steps and profile.steps[0] > last:
        text = f"profile.step_range {profile.step_range} is behind the last step, {last}"
        yield {"profile.step_range", "train.train_steps"}, f"{text}: --profile-step-range {max(last - 2, 1)}-{last}"
