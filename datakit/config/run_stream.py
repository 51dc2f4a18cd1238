"""RunStream: the stream of a run's TOML file, without the trainer.

It reads all of `[data]` that is in StreamConfig, the keys of `[train]` that are in StepConfig, and nothing else. A key
that is in neither is the trainer's, which refuses unknown ones. Every `--help` that shows these keys reads this file,
so numpy is imported by methods alone.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from datakit.config.step_config import StepConfig
from datakit.config.steps import Steps
from datakit.config.stream_config import SAMPLE, StreamConfig
from threefold.needs import unmet
from threefold.options import Fault, FlagText, merge, raise_faults, read_toml, walk

if TYPE_CHECKING:
    from datakit.order.blend import Blend
    from datakit.order.stream_record import Recorded


@dataclass(frozen=True, slots=True)
class RunStream:
    """The tables of a run's file that its stream depends on."""

    data: StreamConfig = field(default_factory=StreamConfig)
    train: StepConfig = field(default_factory=StepConfig)

    @classmethod
    def read(cls, path: str, overrides: Mapping[str, FlagText] | None = None) -> "RunStream":
        """Return the tables of a TOML file, flags put in; UserError that lists all faults of these keys."""
        known = {"data": fields(StreamConfig), "train": fields(StepConfig)}
        tables = read_toml(path, sample=SAMPLE)
        for name, table in tables.items():
            if name in known and isinstance(table, Mapping):
                names = {key.name for key in known[name]}
                tables[name] = {key: value for key, value in table.items() if key in names}
        faults: list[Fault] = []
        run = walk(cls, merge({name: tables[name] for name in known if name in tables}, overrides or {}), faults)
        faults = faults or [*run.data.faults("data"), *run.train.faults("train"), *unmet(run)]
        raise_faults(path, faults, hint=f"{SAMPLE} documents every key")
        return run

    def open(self, recorded: "Recorded | None" = None) -> "Blend":
        """Return the blend that the run reads; `recorded` is what a checkpoint of it says of its stream."""
        return self.data.open(self.train, table="data", recorded=recorded)

    def steps(self, recorded: "Recorded | None" = None) -> Steps:
        """Return which samples steps read; their batch size may have changed up to what a checkpoint recorded."""
        return self.data.steps_of(self.train, recorded)

    def num_steps(self, blend: "Blend", steps: Steps | None = None) -> int:
        """Return the last step of the run: `train_steps`, or the step that ends epoch `max_epochs` of a store."""
        known, last_epoch = steps or self.steps(), self.data.max_epochs
        if not last_epoch:
            return self.train.train_steps
        later = range(known.first_known, self.train.train_steps)
        ends = bisect_left(later, True, key=lambda step: max(blend.epochs(known.num_samples(step))) >= last_epoch)
        return min(self.train.train_steps, known.first_known + ends)
