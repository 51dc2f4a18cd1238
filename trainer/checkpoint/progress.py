"""How far a run is, what a checkpoint records of that, and what a start of a run begins with."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from datakit import Cursor, Recorded, StreamRecord
from trainer.config import Config, Fp8Config, HealthConfig, LogConfig, ProfileConfig
from trainer.loss_scale import recorded
from trainer.store.lr import learning_rate
from trainer.verdict import StepStats

YOUNG = {  # keys of the configuration that older code refuses, by table
    "optim": [
        "schedule",
        "wsd_decay_steps",
        "wsd_decay",
        "cool_down_steps",
        "cool_down_from",
        "cool_down_lr",
        "groups",
        "name",
        "allow_reset",
        "momentum",
        "nesterov",
        "muon_lr",
        "muon_momentum",
        "muon_steps",
        "muon_scale",
        "offload",
        "offload_window_mib",
    ],
    "train": [
        "rampup_batch_size",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "cuda_graphs",
        "recompute_offload",
    ],
    "data": ["valid_sets"],
    "parallel": ["tp_overlap_parts"],
    "fp8": [field.name for field in dataclasses.fields(Fp8Config)],
    "profile": [field.name for field in dataclasses.fields(ProfileConfig)],
    "health": [field.name for field in dataclasses.fields(HealthConfig)],
    "log": [field.name for field in dataclasses.fields(LogConfig) if field.name not in ("metrics", "interval")],
}


@dataclass(frozen=True, slots=True)
class Validation:
    """The validation losses after `step` steps, by their names in a checkpoint's metadata."""

    step: int
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is after `step` steps: tokens read, and the data stream's cursor as JSON (None at its start).

    `validation` is the last one since the save before, so that a step is judged by a loss of its own. `stream` is
    the stream's record, as JSON: the cursor has its digest. `voids` are the steps that AdamW does not count: void
    ones, or all before its states began at zero. `scale` is the state of the loss scale, if there is one. `run` is what
    sinks know the run by, empty if none ever had to.
    """

    step: int = 0
    tokens: int = 0
    cursor: Mapping[str, Any] | None = None
    validation: Validation | None = None
    stream: Mapping[str, Any] | None = None
    voids: int = 0
    scale: tuple[float, ...] = ()
    run: str = ""

    def after(self, stats: StepStats) -> "Progress":
        """Return the same with what was read of its step."""
        return dataclasses.replace(self, voids=stats.voids, scale=stats.scale)

    def metadata(self, config: Config, loss: float, device: torch.device, ops: Mapping[str, str]) -> dict[str, Any]:
        """Return what a checkpoint's root records beside the tensors; `ops` are the forms of ops in use."""
        validation, num_samples = self.validation, int(self.cursor["num_samples"]) if self.cursor else 0
        segments = StreamRecord.from_json(self.stream).segments if self.stream else ()
        later = [each.seq_length or 0 for each in segments if each.from_sample < num_samples]  # rows that were read
        return {
            "cursor": self.cursor,
            "cursor_digest": hashlib.sha256(json.dumps(self.cursor, sort_keys=True).encode()).hexdigest()[:16],
            **({"stream": self.stream} if self.stream else {}),
            "tokens": self.tokens,
            "updates": self.step - self.voids,
            **recorded(self.scale),
            **({"run": self.run} if self.run else {}),
            "seq_length": max([config.train.seq_length, *later]),
            "loss": loss,
            **({**validation.losses, "val_step": validation.step} if validation else {}),
            "lr": learning_rate(config.optim, max(self.step - 1, 0)),
            "config": recorded_tables(config),
            "environment": environment(device),
            "ops": dict(ops),
        }


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a start of a run begins with: its progress and settled configuration, the loss of the last step, the URL it
    came from (if any), and whether that is where the run saves to first.

    `newest` is by URL the newest step of each place that holds any, none newer than the one resumed; `ops` are the
    forms of ops that the run recorded, `sinks` the sinks that had its lines.
    """

    progress: Progress
    config: Config
    loss: float = float("nan")
    url: str = ""
    is_own: bool = False
    newest: Mapping[str, int] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)
    sinks: tuple[str, ...] = ()

    @property
    def recorded(self) -> Recorded:
        """What the run recorded of its stream."""
        cursor, stream = self.progress.cursor, self.progress.stream
        known = None if stream is None else StreamRecord.from_json(stream)
        num_samples = int(cursor["num_samples"]) if cursor else 0
        return Recorded(known, self.progress.step, num_samples, Cursor.from_json(cursor) if cursor else None)


def recorded_tables(config: Config) -> dict[str, Any]:
    """Return the tables of a configuration as a step records them: younger keys only where they say something.

    So code that does not know these keys opens the step of a run that does not use them.
    """
    tables, plain = dataclasses.asdict(config), dataclasses.asdict(Config())
    for table, keys in YOUNG.items():
        for key in keys:
            if tables[table][key] == plain[table][key]:
                del tables[table][key]
    return {table: values for table, values in tables.items() if values}


def environment(device: torch.device) -> dict[str, Any]:
    """Return what, beside configuration and layout, must be equal for a resumed run to repeat the other bit for bit."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"device": name, "num_threads": torch.get_num_threads(), "torch": torch.__version__}
