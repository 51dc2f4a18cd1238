"""What a run reports, and to whom."""

from dataclasses import dataclass
from typing import Any, Literal

from threefold.options import option

SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]


def _writes(*names: str) -> dict[str, Any]:
    """Return the need of an option that only some sinks read."""
    text = f"log.to with {' or '.join(names)}: --log.to {','.join(dict.fromkeys(('jsonl', names[0])))}"
    return {text: lambda log: any(name in log.to for name in names)}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`: what the run reports."""

    metrics: str = option("", "file that gets one JSON line a step", flags=["--metrics"], needs=_writes("jsonl"))
    interval: int = option(1, "steps between two lines on the console", minimum=1)
    to: tuple[SinkName, ...] = option(
        ("jsonl",),
        "where lines go: jsonl is log.metrics, and the others get the same values, each from a process of its own",
    )
    tensorboard_dir: str = option("tensorboard", "folder of TensorBoard's files", needs=_writes("tensorboard"))
    project: str = option("threefold", "project of W&B, and experiment of MLflow", needs=_writes("wandb", "mlflow"))
    name: str = option("", "what W&B and MLflow call the run", needs=_writes("wandb", "mlflow"))
    mlflow_uri: str = option(
        "",
        "where MLflow keeps runs; without it MLFLOW_TRACKING_URI, or sqlite:///mlflow.db",
        needs=_writes("mlflow"),
    )
    on_event: str = option(
        "",
        "a command that gets, as JSON on stdin, each save that failed, a stall, a spike of the loss, and the end; "
        "no shell reads it",
        metavar="CMD",
    )
    ranks: Literal["first", "all"] = option(
        "first",
        "all: each rank writes a file of its own times beside log.metrics",
        needs={"log.metrics: --metrics FILE": lambda log: bool(log.metrics)},
    )
    norms_interval: int = option(
        0, "steps between two lines with the norms of each layer's gradients and weights; 0 never", minimum=0
    )
