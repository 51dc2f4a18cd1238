"""The run's voice: one line a step for the metrics file and other sinks, one readable line on the console.

Between the lines of steps are lines with an "event" key: start, save, copy, eval, void, resume, epoch, seq_length,
spike, end; and behind the end a line for each sink that lost some.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from threefold.cli import log
from threefold.console import fitting
from threefold.masking import masked_values
from trainer.model.flops import TokenFlops
from trainer.observe.feed import Feed, close_all
from trainer.observe.json_lines import JsonLines
from trainer.observe.spikes import Spikes

SINKS_END_WITHIN_S = 30.0  # all together
WAIT_SHOWN = 0.1  # waits of a smaller share of a step are in the metrics file alone


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of the metrics file. Loss, grad norm and lr are global; times are those of the slowest rank."""

    step: int  # steps done, this one included
    loss: float  # sum of token losses / unmasked tokens of the global batch; null if it is not finite, of a void step
    grad_norm: float  # before clipping; null as the loss
    lr: float
    tokens: int  # read since the start of training
    loss_tokens: int  # of this step, those whose loss counts
    tokens_per_s: float
    tokens_per_s_per_gpu: float  # of one rank: a GPU, or on a CPU a process
    samples_per_s: float
    tflops_per_gpu: float  # 6N + 12LdS operations a token, N without look-up tables
    mfu: float | None  # the same against the device's peak; None on CPU and on an unknown device
    mfu_with_embeddings: float | None
    mfu_causal: float | None
    step_s: float  # since the end of the step before: data, arithmetic, communication, the stall of a save between
    data_wait_s: float
    comm_s: float  # in collectives; tensor-, context- and data-parallel ones are counted apart too
    comm_tp_s: float
    comm_cp_s: float
    comm_dp_s: float
    bubble_s: float
    checkpoint_stall_s: float
    memory_gib: float  # peak of one rank: GPU memory allocated, or resident set on a CPU
    memory_of_plan: float | None  # the most that torch reserved on a GPU over its plan; None on a CPU
    train_steps: int | None = None  # after which the run is complete
    forward_s: float = 0.0  # in forward passes, with their collectives, of the rank that has most
    backward_s: float = 0.0  # in backward passes, with the products that they put off
    update_s: float = 0.0  # in the optimizer's update; on GPUs the next forward may run beside it
    memory_share: float | None = None  # the most that torch reserved over the GPU's memory; None on a CPU
    gpu_utilisation: float | None = None  # share of the time in which a kernel ran, lowest of the GPUs; None unknown
    gpu_power_w: float | None = None  # of the GPU that takes most
    gpu_temperature_c: float | None = None  # of the hottest GPU
    expert_load: float | None = None  # the most tokens of an expert over the mean, in any layer; None without experts
    idle_experts: float | None = None  # experts of any layer that had no token in 100 steps
    rank_load: float | None = None  # the most tokens of a rank's experts over the mean; None unless ep cuts experts
    rank_rows: float | None = None  # the most rows that a micro-batch needed on a rank, over the mean
    loss_scale: float | None = None  # of fp16, behind the step
    void_steps: int | None = None  # of fp16, up to and with this one: they changed nothing
    fp8_saturated: tuple[float, ...] | None = None  # of each layer, the share of values that are the largest of fp8
    fp8_zero: tuple[float, ...] | None = None  # and of those that are zero in fp8 alone; None if they were not counted
    grad_norms: Mapping[str, float] | None = None  # of each layer, before clipping; None but every log.norms_interval
    weight_norms: Mapping[str, float] | None = None  # of each layer, before the update

    def console(self, train_steps: int, left_s: float) -> str:
        """Return the line for people; `left_s` is how long the steps that are left will take."""
        width = len(str(train_steps))
        waits = {
            "data": self.data_wait_s, "comm": self.comm_s, "bubble": self.bubble_s, "save": self.checkpoint_stall_s
        }  # fmt: skip
        several = f" ({self.tokens_per_s_per_gpu:,.0f} a rank)" if self.tokens_per_s_per_gpu < self.tokens_per_s else ""
        parts = [
            f"step {self.step:>{width}}/{train_steps}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            *([f"scale {self.loss_scale:,.15g}"] if self.loss_scale is not None else []),
            f"{self.tokens_per_s:,.0f} tok/s{several}",
            f"eta {timedelta(seconds=round(left_s))}",
            *([f"mfu {self.mfu:.1%}"] if self.mfu is not None else []),
            f"{self.memory_gib:.2f} GiB",
            *(f"{name} {wait / self.step_s:.0%}" for name, wait in waits.items() if wait >= WAIT_SHOWN * self.step_s),
            f"{self.loss_tokens:,} loss tok",
        ]
        return fitting(parts)


def throughput(
    *, num_tokens: int, num_samples: int, step_s: float, world_size: int, flops: TokenFlops, peak: float | None
) -> dict[str, Any]:
    """Return the fields of StepMetrics that are rates of one step; `peak` is one device's operations a second."""
    rank_tokens_per_s = num_tokens / step_s / world_size

    def utilisation(flops_a_token: float) -> float | None:
        return None if peak is None else rank_tokens_per_s * flops_a_token / peak

    return {
        "tokens_per_s": num_tokens / step_s,
        "tokens_per_s_per_gpu": rank_tokens_per_s,
        "samples_per_s": num_samples / step_s,
        "tflops_per_gpu": rank_tokens_per_s * flops.standard / 1e12,
        "mfu": utilisation(flops.standard),
        "mfu_with_embeddings": utilisation(flops.with_embeddings),
        "mfu_causal": utilisation(flops.causal),
    }


def finite(value: Any) -> Any:
    """Return a value, None in place of a number that JSON does not know: a void step has some."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Hands steps and events to the sinks, from the training thread; events may come from another one.

    It is silent on any rank but the first, apart from the file that a rank may have of its own.
    """

    def __init__(
        self,
        file: JsonLines | None,
        feeds: Sequence[Feed] = (),
        *,
        train_steps: int,
        interval: int,
        active: bool = True,
        own: JsonLines | None = None,
    ) -> None:
        """Take open sinks; `own` gets this rank's times alone."""
        self._file, self._feeds, self._own, self._active = file, list(feeds), own, active
        self._train_steps, self._interval = train_steps, interval
        self._first: tuple[int, float] | None = None  # the first step, which is slower than others, and its end
        self._lock, self._spikes, self._is_over = threading.Lock(), Spikes(), False

    def step(self, metrics: StepMetrics) -> None:
        """Write one step to the sinks and, at the console interval and at the end, to the console."""
        self._line({name: finite(value) for name, value in asdict(metrics).items()})
        if metrics.step % self._interval == 0 or metrics.step in (1, self._train_steps):
            self.say(metrics.console(self._train_steps, self._left_s(metrics)))
        if self._active and (spike := self._spikes.seen(metrics.loss)):
            self.event("spike", metrics.step, **spike)
            self.say(f"step {metrics.step}: the loss is {metrics.loss:.4f}, it was {spike['mean']:.4f} on average")

    def of_rank(self, step: int, rank: int, measured: Mapping[str, Any]) -> None:
        """Write this rank's times of a step to its own file, if it has one."""
        if self._own is not None:
            self._own.write({"step": step, "rank": rank, **measured})

    def _left_s(self, metrics: StepMetrics) -> float:
        """Return the seconds left, at the mean of steps since the first, saves and evaluations included."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = metrics.step, now_s
        step, ended_s = self._first
        mean_s = (now_s - ended_s) / (metrics.step - step) if metrics.step > step else metrics.step_s
        return mean_s * (self._train_steps - metrics.step)

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Write one event to the sinks."""
        self._line({"event": kind, "step": step, **values})

    def say(self, text: str) -> None:
        """Print one line on the console."""
        if self._active:
            log(text)

    def end(self, step: int, *, complete: bool, **values: Any) -> None:
        """Write the end, once, and close all sinks; what these lost is the last that the file gets."""
        if self._is_over:
            return
        self._is_over = True
        self.event("end", step, complete=complete, **values)
        for loss in close_all(self._feeds, SINKS_END_WITHIN_S):
            if loss.lost:
                self.say(f"warning: {loss.sink} lost {loss.lost} of {loss.lines} lines")
                if self._file is not None:
                    self._file.write({"event": "sink", "step": step, **asdict(loss)})
        for file in (self._file, self._own):
            if file is not None:
                file.close()

    def _line(self, values: dict[str, Any]) -> None:
        line = masked_values(values)
        with self._lock:
            for sink in (self._file, *self._feeds):
                if sink is not None:
                    sink.write(line)
