"""What a run watches of its ranks: stalls, stragglers, and their hardware before the start."""

from dataclasses import dataclass
from typing import Literal

from threefold.options import option


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """`[health]`: when ranks that make no progress, or less than others, are named."""

    stall_s: float = option(
        45.0,
        "name the rank that others wait for once no rank has made progress for so many seconds; 0 never",
        minimum=0,
        flags=["--stall-s"],
    )
    path: str = option(
        "",
        "folder of reports on stalls, and of what each rank did last before an end that is not clean; empty: flight/ "
        "beside log.metrics, or a temporary folder",
    )
    straggler_share: float = option(
        0.1, "name a rank whose own work takes longer than the median of ranks by this share; 0 never", minimum=0
    )
    straggler_steps: int = option(50, "steps whose times are added before ranks are compared", minimum=1)
    check_hardware: Literal["off", "warn", "refuse"] = option(
        "off",
        "before the start, time products, memory and transfers of each rank: name those that are slow, or end",
        shorthands={"--check-hardware": "warn"},
    )
    hardware_share: float = option(
        0.2,
        "how far below the median of ranks, or what its card can do, a rank is slow",
        above=0,
        needs={"check_hardware": ("warn", "refuse")},
    )
