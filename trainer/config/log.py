"""What a run reports."""

from dataclasses import dataclass

from threefold.options import option


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`: what the run reports."""

    metrics: str = option("", "file that gets one JSON line a step", flags=["--metrics"])
    interval: int = option(1, "steps between two lines on the console", minimum=1)
