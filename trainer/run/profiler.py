"""Profiler: traces of some steps of a run, with ranges for what is in work, and what their kernels take by kind.

Without a range of steps, and without NVTX, nothing of torch's profiler is called: a step takes one comparison. In the
steps that are profiled the host waits for the device, at the first and behind the last.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.config import Config
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.model.chunk import unmarked
from trainer.observe.kernels import table
from trainer.pipeline.actions import PASSES, Action


class Ranges:
    """Named ranges around what this rank does, in a trace and for NVTX; owned by the training thread."""

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Enclose work under a name."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()


class Profiler:
    """What a run's configuration wants to be profiled, on this rank; owned by the training thread."""

    def __init__(self, config: Config, ranks: Ranks, engine: Engine, step: int) -> None:
        """Wait for the first step of the range, in a run that has done `step` steps."""
        self._steps, self._folder = config.profile.steps, Path(config.profile.path)
        self._ranks, self._engine = ranks, engine
        self._profile: torch.profiler.profile | None = None
        self._first = self._steps[0] if self._steps else 0
        if self._steps and step >= self._steps[-1]:
            over = f"profile.step_range {config.profile.step_range} is over"
            ranks.say(f"warning: {over}: the run goes on from step {step}")
        self._on_gpu = ranks.device.type == "cuda"
        if config.profile.nvtx:
            mark_ranges(engine, Ranges(nvtx=self._on_gpu))

    def around(self, step: int, action: Callable[[], None]) -> None:
        """Take a step, and profile it if it is one of the range."""
        if self._profile is None and self._first and step in self._steps:
            self._begin()
        try:
            action()
        except torch.OutOfMemoryError:
            if self._steps:
                self._write_memory()
            raise
        if self._profile is not None and step >= self._steps[-1]:
            self.end()

    def _begin(self) -> None:
        self._first = 0  # once
        self._unmark = mark_ranges(self._engine, Ranges(nvtx=self._on_gpu))
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._ranks.device)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profile = torch.profiler.profile(activities=kinds, acc_events=True)  # or it warns
        self._profile.start()

    def end(self) -> None:
        """Write what was profiled so far, if anything was: the run may end inside the range."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._on_gpu:
            torch.cuda.synchronize(self._ranks.device)
        profile.stop()
        self._unmark()
        rank = f"rank-{self._ranks.rank:05}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_memory()
            profile.export_chrome_trace(str(self._folder / f"trace-{rank}.json.gz"))
            lines = table(profile)
            (self._folder / f"kernels-{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            self._ranks.say(f"warning: what was profiled is not written: {error}")
            return
        steps = f"{self._steps[0]}-{self._steps[-1]}"
        self._ranks.say("\n  ".join([f"steps {steps} are profiled in {self._folder}", *lines]))

    def _write_memory(self) -> None:
        """Write a GPU's memory, for pytorch.org/memory_viz; with what was allocated where, if that was recorded."""
        if self._on_gpu:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank-{self._ranks.rank:05}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def mark_ranges(engine: Engine, ranges: Ranges) -> Callable[[], None]:
    """Enclose passes of stages and micro-batches, and layers in them, in ranges; return what takes them away.

    A layer's range is of its forward pass. The backward pass of a micro-batch has one range, of the whole stage.
    """
    pipeline, usual = engine.pipeline, engine.pipeline.around

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        name = f"{action.kind} stage {action.stage} micro-batch {action.microbatch}"
        with ranges.around(name if action.kind in PASSES else action.kind), usual(action):
            yield

    pipeline.around = around
    for chunk in engine.chunks.values():
        chunk.around_layer = lambda number: ranges.around(f"layer {number}")

    def unmark() -> None:
        pipeline.around = usual
        for chunk in engine.chunks.values():
            chunk.around_layer = unmarked

    return unmark
