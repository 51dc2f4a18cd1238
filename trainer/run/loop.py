"""The training loop: resume, step, log, save; the same code on one process and on many."""

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from datakit import HostBatch
from threefold.console import print_facts
from threefold.errors import EXIT_OK, UserError
from trainer.checkpoint.changes import PARTS
from trainer.checkpoint.node_local import tiers_here
from trainer.checkpoint.progress import Validation
from trainer.checkpoint.resume import resume
from trainer.checkpoint.saver import Saver
from trainer.config import Config
from trainer.config.resolve import batch_sizes
from trainer.data import StepReader, open_blend, open_loader, token_fault, with_vocabulary
from trainer.engine import Engine
from trainer.job.failure import code_of_rank
from trainer.job.ranks import Ranks
from trainer.job.whereabouts import RankLost
from trainer.mesh.clock import Moment
from trainer.mesh.mesh import mesh_of
from trainer.model.flops import BatchFlops
from trainer.model.stages import with_layers
from trainer.model.table import parameter_table
from trainer.observe.gpu import Gpu
from trainer.observe.peaks import known_peak
from trainer.run.banner import banner
from trainer.run.environment import make_deterministic, ranks_of
from trainer.run.evaluate import Evaluations
from trainer.run.expert_rows import limit_rows
from trainer.run.first_step import FirstStep
from trainer.run.hardware import check_hardware
from trainer.run.health import Health
from trainer.run.last_good import LastGood
from trainer.run.logs import check_sinks, open_log, with_run
from trainer.run.memory_check import check_memory, device_memory, refuse_without_room_for_inputs
from trainer.run.out_of_memory import MemoryWatch
from trainer.run.profiler import Profiler
from trainer.run.start_times import StartTimes
from trainer.run.started import Intake, Started, memory_share, peak_memory_gib
from trainer.run.step_report import StepReport
from trainer.run.stop import OUT_OF_TIME, StopRequest, cause_of, exit_code
from trainer.run.stream_events import StreamEvents
from trainer.verdict import Outcome, StepStats


def train(config: Config) -> int:
    """Train until the last step, the last epoch, a signal that asks for an end or `train.max_time_s`, and save.

    Return the exit code. It is 0 after the last step, and under torchrun, which would end the other ranks for any other
    code; else 128 and the signal's number, or 124 if the time was over.
    """
    max_time_s, times = config.train.max_time_s, StartTimes()
    if config.train.deterministic:
        make_deterministic()
    speaks = os.environ.get("RANK", "0") == "0"
    with (
        StopRequest(speaks=speaks, max_time_s=max_time_s) as stop,
        ranks_of(config) as ranks,
    ):
        times.end("meeting")
        stop.at_term = ranks.leave_if_lost
        run = Run(ranks.on_all(lambda: completed(config)), ranks, stop, times)
        with run.saving_at_faults():
            while run.goes_on:
                ranks.naming_rank(lambda: run.memory.answering(run.next_step))
        return ranks.naming_rank(run.finish)


def completed(config: Config) -> Config:
    """Return the configuration with what follows from its stores: the vocabulary's size, and layers by cost."""
    config = with_vocabulary(config)
    return with_layers(config, parameter_table(config))


class Run:
    """One start of a run, from the resumed step on: its thread trains, and every rank makes the same calls."""

    def __init__(self, config: Config, ranks: Ranks, stop: StopRequest, times: StartTimes) -> None:
        """Build this rank's part of the model, resume, and open data, log and checkpointer."""
        self.ranks, self._stop, self._health = ranks, stop, Health(config, ranks)
        ranks.on_all(lambda: check_sinks(config.log) if ranks.rank == 0 else None)
        blend = ranks.on_all(lambda: open_blend(config))
        ranks.on_all(lambda: check_memory(config, device_memory(ranks.device), ranks.say))
        check_hardware(config, ranks)
        self.mesh = mesh_of(config, ranks.rank, ranks.device, page=ranks.page)
        self.memory = MemoryWatch(config, ranks, self.mesh.coords.pp)
        self.engine = ranks.on_all(lambda: self.memory.making(lambda: Engine(config, self.mesh)))
        ranks.on_all(lambda: refuse_without_room_for_inputs(config, self.mesh))
        ranks.before_end.append(self.engine.close)
        tiers = tiers_here(ranks, config)
        if ranks.rank == 0:
            print_facts(banner(config, ranks.device, blend, tiers))
        limit_rows(self.engine.balance.limit, config, ranks)
        times.end("building")
        resumed = resume(ranks, self.engine, config, tiers)
        times.end("loading")
        self.config = self.engine.config = config = resumed.config
        self._choose_ops(resumed.ops)
        attempt = ranks.broadcast(secrets.token_hex(8))
        self.progress = with_run(resumed.progress, config, attempt)
        if config.data.mixture:  # what was recorded says where a step begins, and how much was read of what is gone
            blend = ranks.on_all(lambda: open_blend(config, resumed.recorded))
        dp_rank, cursor = self.mesh.coords.dp, self.progress.cursor
        self._loader = ranks.on_all(lambda: open_loader(blend, config, dp_rank, cursor, resumed.recorded, ranks.say))
        blend = self._loader.blend
        self._record = blend.record.to_json()
        self._reader = ranks.on_all(lambda: StepReader(self._loader, ranks.device))
        flops = BatchFlops(config, self.engine.table)
        self._intake = Intake(self._reader, self._loader, self._fault_of, flops.of)
        self._log = ranks.on_all(lambda: open_log(config, ranks, self.progress, resumed.sinks))
        self._health.log = self._log
        if resumed.url:
            self._log.event("resume", self.progress.step, url=resumed.url)
        self._saver = ranks.on_all(
            lambda: Saver(config, ranks, self.engine, self._log, tiers, attempt=attempt, resumed=resumed)
        )
        self._good = LastGood(ranks, self._saver, self.progress, resumed.loss)
        self._evaluation: Evaluations | None = None
        if config.train.eval_interval:
            self._evaluation = ranks.on_all(lambda: Evaluations(config, self.engine, self.mesh, ranks.say))
        self._events = StreamEvents(self._loader, batch_sizes(config), self._log)
        self._peak = known_peak(ranks.device, config.train.peak_tflops, ranks.say)
        num_microbatches, _, length = self._loader.shape
        first_flops = flops.of_rows(length).standard * self._loader.global_batch_size * length / ranks.world_size
        self._first_step = FirstStep(self.engine, num_microbatches, flops=first_flops, say=ranks.say)
        self._blend = blend
        self._profiler = Profiler(config, ranks, self.engine, self.progress.step)
        self._stopped_by = 0  # the number of a signal, the same on all ranks
        self._gpu = Gpu(ranks.device)
        self._reads_late = ranks.device.type == "cuda"  # its work is only enqueued
        self._started: Started | None = None
        self._ended, self._paused_s = Moment(ranks.device), 0.0
        times.end("opening")
        self._start_times: StartTimes | None = times  # until the first step has ended

    @property
    def goes_on(self) -> bool:
        """Return whether there is another step to do."""
        return not self._is_complete and not self._stopped_by

    @property
    def _is_complete(self) -> bool:
        last_epoch = self.config.data.max_epochs
        is_last_epoch = last_epoch > 0 and max(self._events.epochs) >= last_epoch
        return self.progress.step >= self.config.train.train_steps or is_last_epoch

    def next_step(self) -> None:
        """Take the next step, and profile it if it is among those of `profile.step_range`."""
        self._profiler.around(self.progress.step + 1, self.step)

    def step(self) -> None:
        """Read, train, log, evaluate and save if due.

        On a GPU the line of a step is written while the next one runs, except before what needs its outcome.
        """
        number = self.progress.step + 1
        self.ranks.note(number, "reads its batch")
        taken = self._intake.take()
        self.ranks.note(number, "trains")
        self._first_step.begin()
        with self._good.changing():
            stats = self.engine.start_step(self.progress.step, taken.batch, before_update=self._good.begin_change)
        self._first_step.end()
        before = self.progress
        tokens = before.tokens + taken.num_tokens
        validation = None if self._saver.due_step == before.step else before.validation
        self.progress = dataclasses.replace(
            before, step=number, tokens=tokens, cursor=taken.cursor, validation=validation, stream=self._record
        )
        earlier, self._started = self._started, Started(before, self.progress, taken, stats)
        if earlier is not None:  # whatever that raises, the state is that of the step that is started
            self._report_step(earlier)
        if self._started is not None:
            self._events.begin_step(number, taken)
        if not self._reads_late or self._is_complete:
            self._report()
        if self.progress.step != number:  # a void step is taken once more
            return
        self._events.end_step(number, taken)
        is_due = self.config.train.eval_interval and self.progress.step % self.config.train.eval_interval == 0
        evaluates = self._evaluation is not None and (is_due or self._is_complete)
        saves = self._saver.should_save(self.progress.step)
        if evaluates or saves:
            self._report()
        if self.progress.step != number:
            return
        if evaluates:  # before the save, which records it
            self.ranks.note(number, "evaluates")
            self._evaluate()
        if saves:
            self.ranks.note(number, "saves")
            self._saver.save(self.progress, self._good.loss)

    def finish(self) -> int:
        """Save the last step, wait for it, close everything, and return the exit code."""
        with self.saving_at_faults():
            self._report()
        self._profiler.end()
        self.ranks.note(self.progress.step, "saves")
        if (failure := self._saver.finish(self.progress, self._good.loss)) is not None:  # the same on all ranks
            self._log.end(self.progress.step, complete=False, error=failure.message)
        self.ranks.raise_on_all(failure)
        self._loader.close()
        how = "done" if self._is_complete else f"stopped by {cause_of(self._stopped_by)}"
        self.ranks.say(f"{how} after step {self.progress.step}{self._health.summary}")
        self._log.end(self.progress.step, complete=self._is_complete)
        if self._is_complete:
            return code_of_rank(EXIT_OK)
        self.ranks.ended_by = how if self._stopped_by != OUT_OF_TIME else ""
        self.ranks.maximum([0.0])  # a launcher ends all ranks when one exits with a code: none before all are done
        return code_of_rank(exit_code(self._stopped_by))

    @contextmanager
    def saving_at_faults(self) -> Iterator[None]:
        """Save the last good step if what is enclosed raises an error, which goes on; one of the save is reported."""
        try:
            yield
        except Exception as fault:
            if not (isinstance(fault, RankLost) and self._started is not None):  # that step may wait without an end
                try:
                    with suppress(UserError):  # of a step that does not count: the one before it does
                        self._report(is_alone=True)
                    self._good.save_after(fault)
                except Exception as failure:
                    self.ranks.say(f"warning: step {self._good.progress.step} is not saved: {failure}")
            self._log.end(self._good.progress.step, complete=False, error=str(fault))
            raise

    def _fault_of(self, host: HostBatch) -> UserError | None:
        samples = self._loader.samples(host.first_sample)
        return token_fault(host, samples, self._blend, self.config.model.vocab_size)

    def _report(self, *, is_alone: bool = False) -> None:
        """Read the step that was started last, if it is not read yet, log it, and agree on what comes next.

        With `is_alone` the other ranks do not come to that.
        """
        started, self._started = self._started, None
        if started is not None:
            self._report_step(started, is_alone=is_alone)

    def _report_step(self, started: Started, *, is_alone: bool = False) -> None:
        self.ranks.note(self.progress.step, "waits for its device")
        stats, ranks = self._read(started, is_alone=is_alone), self.ranks
        if stats.outcome is not Outcome.COUNTS:
            self._log.event("void", started.progress.step, repeats=stats.outcome is Outcome.REPEATED)
        if stats.outcome is Outcome.REPEATED:
            self.engine.balance.limit.make_room(stats.of_experts.get("rank_rows", 0.0))
            self._go_back(started)
            return
        measured = {
            "data_wait_s": started.taken.wait_s,
            "memory_gib": peak_memory_gib(ranks.device),
            "memory_share": memory_share(ranks.device),
            "memory_of_plan": self.memory.share_of_plan or 0.0,
            **self._gpu.numbers,
        }
        report = StepReport.of(stats, measured, self._saver, self._stop.number)
        ranks.note(self.progress.step, "agrees")
        agreed = report if is_alone else report.combined(ranks)
        self._saver.note_agreed(is_any_busy=bool(agreed.is_any_busy), is_time=bool(agreed.is_time))
        step_s = started.stats.ended.seconds_since(self._ended) - self._paused_s
        self._ended, self._paused_s = started.stats.ended, 0.0
        flops = started.taken.flops if is_alone else started.taken.mean_flops(ranks)
        rates = {"world_size": ranks.world_size, "flops": flops, "peak": self._peak}
        self._log.of_rank(started.progress.step, ranks.rank, {"step_s": step_s, **report.fields})
        norms = self.engine.norms.by_layer(stats.squares)
        self._log.step(agreed.line(started, stats, self.config.train, step_s=step_s, norms=norms, **rates))
        if self._start_times is not None:
            self._start_times.end("first_step")
            self._log.event("start", started.progress.step, **self._start_times.seconds)
            self._start_times = None
        if not is_alone:
            waits_s = stats.comm_s + stats.bubble_s + report.fields["checkpoint_stall_s"]
            self._health.note_step(started.progress.step, step_s - waits_s)
            self._saver.check(int(agreed.num_failed))
        self._stopped_by = int(agreed.stopped_by)

    def _read(self, started: Started, *, is_alone: bool) -> StepStats:
        """Wait for a step, or raise on all ranks: what is wrong with the batch of some, else that it does not count."""
        try:
            stats = started.stats.read()
        except UserError as error:  # all ranks see it
            if not is_alone:
                self._end(started.taken.fault, error)
            raise
        self.progress = self.progress.after(stats)
        if stats.outcome is not Outcome.REPEATED:
            self._good.note(started.progress.after(stats), stats.loss)
        return stats

    def _go_back(self, started: Started) -> None:
        """Go back before a void step, which is taken once more, with the one that was started after it."""
        later, self._started = self._started, None
        taken = [each.taken for each in (started, later) if each is not None]
        self.progress = dataclasses.replace(started.before, voids=self.progress.voids, scale=self.progress.scale)
        self.engine.verdict.repeat()
        if (error := self._intake.put_back(started.progress.step, taken)) is not None:
            self._end(error)

    def _end(self, *faults: Exception | None) -> None:
        """Save the last good step, and raise the first fault that any rank has; all ranks call it at the same step."""
        self._good.save_together()
        self._log.end(self._good.progress.step, complete=False, error=str(next(filter(None, faults), "")))
        for fault in faults:
            self.ranks.raise_on_all(fault)

    def _choose_ops(self, recorded: Mapping[str, str]) -> None:
        self.engine.choose_ops(recorded, by_timing=not self.config.train.deterministic)
        names = self.engine.choices.names
        if self.ranks.rank == 0:
            print_facts(list(names.items()))
        # what brings another kind of mask is a setting, as are numbers of parts, and is reported as one
        for op in [op for op in {**recorded, **names} if op not in PARTS] if recorded else ():
            form = None if op.startswith("attention") else "csrc"
            before, after = (each.get(op, form) for each in (recorded, names))
            if before != after and before and after:
                self.ranks.say(f"not bit for bit as it was: {op} {before} -> {after}")

    def _evaluate(self) -> None:
        assert self._evaluation is not None, "called only if an evaluation is due"
        started_s = time.perf_counter()
        result = self._evaluation.run()
        if not result.is_finite and self.ranks.faults(self._evaluation.fault):
            self._end(self._evaluation.fault)
        validation = Validation(self.progress.step, result.losses)
        self.progress = dataclasses.replace(self.progress, validation=validation)
        self._good.note(self.progress, self._good.loss)
        self._log.event("eval", self.progress.step, **result.event)
        self._log.say(f"step {self.progress.step}: {result}")
        self._paused_s = time.perf_counter() - started_s  # the time of no step
