"""StepReport: what a rank measured of a step and asks of the others, and the line that all of them make together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.saver import Saver
from trainer.config import TrainConfig
from trainer.job.ranks import Ranks
from trainer.observe.metrics import StepMetrics, throughput
from trainer.run.started import Started
from trainer.verdict import StepStats

TIMES = (  # of a step, in its statistics and its line
    "comm_s", "comm_tp_s", "comm_cp_s", "comm_dp_s", "bubble_s", "forward_s", "backward_s", "update_s"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepReport:
    """Of one rank, or `combined`: the largest of all ranks, the same on each. `asked` are a save's and a stop's."""

    measured: Mapping[str, float]
    num_failed: float  # saves in a row
    stopped_by: float  # the number of a signal
    is_any_busy: float
    is_time: float

    @classmethod
    def of(cls, stats: StepStats, measured: Mapping[str, float], saver: Saver, stopped_by: int) -> "StepReport":
        """Return that of this rank; the saver is asked whether it is busy before it is polled, so of an ended save."""
        is_busy, waits = saver.is_busy, {name: getattr(stats, name) for name in TIMES}
        stall_s = saver.pop_stall_s()
        return cls(
            {**waits, "checkpoint_stall_s": stall_s, **measured}, saver.poll(), stopped_by, is_busy, saver.is_time
        )

    def combined(self, ranks: Ranks) -> "StepReport":
        """Return the largest of all ranks, which make this call at the same step."""
        asked = map(float, (self.num_failed, self.stopped_by, self.is_any_busy, self.is_time))
        largest = ranks.maximum([*self.measured.values(), *asked])
        return StepReport(dict(zip(self.measured, largest)), *largest[len(self.measured) :])

    @property
    def fields(self) -> dict[str, Any]:
        """Return what was measured as fields of a line: None for what is not known."""
        values: dict[str, Any] = dict(self.measured)
        idle, is_known = values.pop("gpu_idle"), values["gpu_power_w"] > 0
        for name in ("memory_of_plan", "memory_share", "gpu_power_w", "gpu_temperature_c"):
            values[name] = values[name] or None
        return {**values, "gpu_utilisation": 1 - idle if is_known else None}

    def line(
        self,
        started: Started,
        stats: StepStats,
        train: TrainConfig,
        *,
        step_s: float,
        norms: Mapping[str, Any],
        **rates: Any,
    ) -> StepMetrics:
        """Return the step's line; `rates` are what `throughput` takes besides."""
        return StepMetrics(
            step=started.progress.step,
            train_steps=train.train_steps,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            tokens=started.progress.tokens,
            loss_tokens=stats.num_tokens,
            **stats.extras,
            step_s=step_s,
            **norms,
            **self.fields,
            **throughput(
                num_tokens=started.taken.num_tokens,
                num_samples=started.taken.num_samples,
                step_s=step_s,
                **rates,
            ),
        )
