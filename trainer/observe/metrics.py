"""The run's voice: one JSON line a step in the metrics file, one readable line on the console.

A metrics file holds one line for each step, in order, whatever happened to the run: resuming at step N first takes out
the lines of later steps (and a line cut short by a kill). Between them are lines with an "event" key: save, copy, eval,
void, resume, epoch, seq_length, end.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from threefold.cli import log
from threefold.console import fitting
from threefold.errors import StorageError
from threefold.masking import masked_values
from trainer.model.flops import TokenFlops

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
    expert_load: float | None = None  # the most tokens of an expert over the mean, in any layer; None without experts
    idle_experts: float | None = None  # experts of any layer that had no token in 100 steps
    rank_load: float | None = None  # the most tokens of a rank's experts over the mean; None unless ep cuts experts
    rank_rows: float | None = None  # the most rows that a micro-batch needed on a rank, over the mean
    loss_scale: float | None = None  # of fp16, behind the step
    void_steps: int | None = None  # of fp16, up to and with this one: they changed nothing
    fp8_saturated: tuple[float, ...] | None = None  # of each layer, the share of values that are the largest of fp8
    fp8_zero: tuple[float, ...] | None = None  # and of those that are zero in fp8 alone; None if they were not counted

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
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Writes steps and events, on the training thread; silent on any rank but the first."""

    def __init__(self, path: str, *, train_steps: int, interval: int, start_step: int, active: bool = True) -> None:
        """Open (and cut back to `start_step`) the metrics file; an empty path means console only."""
        self._train_steps, self._interval, self._active = train_steps, interval, active
        self._first: tuple[int, float] | None = None  # the first step, which is slower than others, and its end
        self._file: TextIO | None = None
        self._failed = False
        if path and active:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                cut_back(Path(path), start_step)
                self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error.strerror}", hint="--metrics FILE") from error

    def step(self, metrics: StepMetrics) -> None:
        """Write one step to the file and, at the console interval and at the end, to the console."""
        self._line({name: finite(value) for name, value in asdict(metrics).items()})
        if metrics.step % self._interval == 0 or metrics.step in (1, self._train_steps):
            self.say(metrics.console(self._train_steps, self._left_s(metrics)))

    def _left_s(self, metrics: StepMetrics) -> float:
        """Return the seconds left, at the mean of steps since the first, saves and evaluations included."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = metrics.step, now_s
        step, ended_s = self._first
        mean_s = (now_s - ended_s) / (metrics.step - step) if metrics.step > step else metrics.step_s
        return mean_s * (self._train_steps - metrics.step)

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Write one event line to the file."""
        self._line({"event": kind, "step": step, **values})

    def say(self, text: str) -> None:
        """Print one line on the console."""
        if self._active:
            log(text)

    def close(self) -> None:
        """Close the file."""
        self._keep_going(lambda file: file.close())

    def _line(self, values: dict[str, Any]) -> None:
        self._keep_going(lambda file: file.write(json.dumps(masked_values(values)) + "\n"))

    def _keep_going(self, action: Callable[[TextIO], object]) -> None:
        """Act on the file; a full disk is reported once, and what found no room is written with a later line."""
        if self._file is None:
            return
        try:
            action(self._file)
        except OSError as error:
            if not self._failed:
                self.say(f"warning: cannot write {self._file.name}: {error.strerror}; training goes on")
            self._failed = True


def cut_back(path: Path, step: int) -> None:
    """Rewrite a metrics file without the lines of steps after `step` and without lines that are not whole."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    with path.open(encoding="utf-8", errors="replace") as source, temporary.open("w", encoding="utf-8") as target:
        for line in source:
            try:
                keep = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError, RecursionError):  # cut short by a kill
                continue
            if keep:
                target.write(line)
    os.replace(temporary, path)
