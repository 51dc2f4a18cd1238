"""Saver: when a run saves, what it does about a save that fails, and its last save. The training thread calls it."""

import sys
import time
from dataclasses import replace

from ckptkit import Checkpointer, CheckpointerOptions, NodePlaces, Run, SaveReport, Tiers
from threefold.cli import log
from threefold.errors import StorageError, quoted
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.checkpoint.progress import Progress, Resumed
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.observe.metrics import Log

NEVER = sys.maxsize  # the checkpointer counts its own rank's failures only; here all ranks stop together


class Saver:
    """Saves an engine's state in the background; every rank makes the same calls at the same steps.

    A failed save is reported and training goes on: the next interval saves again. `max_failed_saves` in a row end the
    run. Without a URL to save to it does nothing. With `checkpoint.overlap` a save's copies run beside the next step's
    forward and backward: `wait_until_copied` has to come before the state changes. Split masters are put together where
    that backward writes its gradients, so their copies do not.

    `due_step` is the last step after which a save was due, made or skipped; at the start the one resumed from, if the
    interval asks for it: a save at the end of a run comes besides.
    """

    def __init__(
        self, config: Config, ranks: Ranks, engine: Engine, log: Log, tiers: Tiers | None, *, attempt: str,
        resumed: Resumed,
    ) -> None:  # fmt: skip
        """Prepare saves; `attempt` is one name for all ranks of this start of the run."""
        self._config, self._ranks, self._engine, self._log = config, ranks, engine, log
        step, self._due_at_s, self._is_time = resumed.progress.step, time.monotonic(), False
        self.due_step = step if self._is_scheduled(step) else None
        self._saved_step = step if resumed.is_own else None
        self._saved_before: int | None = None
        self._num_failed = 0
        self._num_known_failed = 0  # on any rank
        self._counts = dict.fromkeys(("ok", "failed", "skipped"), 0)
        self._stall_s = 0.0
        self._is_any_busy = False
        self._checkpointer: Checkpointer | None = None
        save = config.checkpoint
        may_overlap = save.overlap == "on" or (save.overlap == "auto" and ranks.device.type == "cuda")
        self._overlaps = may_overlap and config.optim.master == "wide"
        # views of memory that the run keeps: made once, so that a save compares no structure again
        self._pieces = [*saved_pieces(engine.store), *engine.balance.saved_pieces()]
        self._tensors = [*tensor_table(engine.table, engine.dtype, engine.moments), *engine.balance.tensors]
        self._num_bytes = sum(info.size_bytes for info in self._tensors if info.placement.tied_to is None)
        node = tiers.node if tiers is not None else None
        self._leads = ranks.rank == (node.first_writer if node else 0)
        self._run = Run(tiers.own_urls[0]) if tiers is not None else None
        self._places = NodePlaces(tiers.own_urls, node, ranks.rank) if tiers and node else None
        if tiers is not None:
            self._checkpointer = Checkpointer(
                tiers.own_urls[0],
                rank=ranks.rank,
                world_size=ranks.world_size,
                attempt=attempt,
                options=CheckpointerOptions(
                    deadline_s=save.deadline_s,
                    retry_s=save.retry_s,
                    max_failed_saves=NEVER,
                    window_bytes=save.window_mib << 20,
                    # all ranks skip together, or none does: `should_save` sees to it
                    when_busy="abort" if save.when_busy == "abort" else "wait",
                    stripe_count=save.stripe_count,
                    stripe_size_bytes=save.stripe_size_bytes,
                    retention=tiers.first.retention,
                    tiers=tuple(replace(tier, newest=resumed.newest.get(tier.url, 0)) for tier in tiers.destinations),
                    node=tiers.node,
                    code=save.code,
                ),
            )
            self._checkpointer.prepare(self._pieces, self._tensors)

    @property
    def saves(self) -> bool:
        """Whether there is a place to save to."""
        return self._checkpointer is not None

    @property
    def is_time(self) -> bool:
        """Return whether the clock asks for a save: on the first rank alone, as clocks differ."""
        interval_s = self._config.checkpoint.save_interval_s
        is_asked = self._checkpointer is not None and interval_s > 0 and self._ranks.rank == 0
        return is_asked and time.monotonic() - self._due_at_s >= interval_s

    def _is_scheduled(self, step: int) -> bool:
        interval = self._config.checkpoint.save_interval
        return interval > 0 and step % interval == 0

    def should_save(self, step: int) -> bool:
        """Return whether the run saves after `step` steps, its end apart; if it skips that save, that is reported.

        The clock starts again with every save that is due.
        """
        if self._checkpointer is None or not (self._is_time or self._is_scheduled(step)):
            return False
        self.due_step, self._due_at_s, self._is_time = step, time.monotonic(), False
        if self._config.checkpoint.when_busy == "skip" and self._is_any_busy:
            error = "skipped: a save before it still runs"
            self._log_save(SaveReport(step, False, error, 0, 0.0, 0.0, skipped=True), "skipped")
            self._ranks.say(f"the save of step {step} is {error}")
            return False
        return True

    def save(self, progress: Progress, loss: float) -> None:
        """Stage the state, or begin to."""
        assert self._checkpointer is not None, "called only if a save is due"
        self._keep_whole(self._checkpointer)
        self._saved_before, self._saved_step = self._saved_step, progress.step
        self._engine.store.join_masters()  # an update may still run beside
        self._stall_s += self._checkpointer.save(
            progress.step,
            self._pieces,
            tensors=self._tensors,
            layout=layout_of(self._config),
            num_layers=self._config.model.num_layers,
            metadata=progress.metadata(self._config, loss, self._ranks.device, self._engine.choices.names),
            overlap=self._overlaps,
        )

    def _keep_whole(self, checkpointer: Checkpointer) -> None:
        """Keep the newest step that all nodes hold, as far as that is known: one may fail to save the next.

        While the last save runs on a node, the one before it has ended on all.
        """
        if self._places is None or self._num_known_failed:
            return
        steps = (self._saved_before, self._saved_step) if self._is_any_busy else (self._saved_step,)
        checkpointer.needed = tuple(step for step in steps if step is not None)

    def wait_until_copied(self) -> None:
        """Wait until the state may change."""
        if self._checkpointer is not None:
            self._stall_s += self._checkpointer.join()

    def pop_stall_s(self) -> float:
        """Return the seconds that saves held the run up since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    @property
    def is_busy(self) -> bool:
        """Return whether this rank's save still runs."""
        return self._checkpointer is not None and self._checkpointer.is_busy

    def note_agreed(self, *, is_any_busy: bool, is_time: bool) -> None:
        """Note what ranks found together: whether any rank's save still runs, and whether the first rank's clock asks
        for a save.
        """
        self._is_any_busy, self._is_time = is_any_busy, is_time

    def poll(self) -> int:
        """Report the saves that ended since the last call; return how many in a row failed on this rank."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.poll())
        return self._num_failed

    def check(self, num_failed: int) -> None:
        """End the run, on all ranks together, if so many saves in a row failed on any rank; all ranks call it."""
        self._make_up(num_failed)
        self._ranks.raise_on_all(self._end_of(num_failed))

    def _make_up(self, num_failed: int) -> None:
        if num_failed > self._num_known_failed and self._checkpointer is not None:
            self._checkpointer.copy_next()  # the slower tiers have not got that step
        self._num_known_failed = num_failed

    def _end_of(self, num_failed: int) -> StorageError | None:
        if num_failed < self._config.checkpoint.max_failed_saves:
            return None
        assert self._checkpointer is not None, "a save failed"
        url = self._checkpointer.url
        return StorageError(
            f"{num_failed} saves in a row to {url} failed",
            hint=f"make room, or reach the storage, and run the same command; safe steps: ckptkit ls {quoted(url)}",
        )

    def wait(self) -> None:
        """Wait for the save that runs, and report it: what it saves is good, even if the run ends now."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.wait())

    def save_part(self, progress: Progress, loss: float) -> None:
        """Stage this rank's part of a step for its writer, which finishes it whatever becomes of this process."""
        if self._checkpointer is None:
            return
        if self._saved_step != progress.step:
            self.wait()
            self.save(progress, loss)
        self.wait_until_copied()

    def finish(self, progress: Progress, loss: float) -> StorageError | None:
        """Make sure that the last step is saved: a save that fails is tried again, up to the bound.

        Return why it is not saved, the same on all ranks, if it is not.
        """
        if self._checkpointer is None:
            return None
        if self._saved_step != progress.step:
            self.save(progress, loss)
        while True:
            self._report(self._checkpointer.wait())
            num_failed = int(self._ranks.maximum([self._num_failed])[0])
            if not num_failed:
                break
            self._make_up(num_failed)
            if (failure := self._end_of(num_failed)) is not None:
                return failure
            self._ranks.say(f"saving step {progress.step} again")
            if (places := self._places) is not None:  # no step is made of two tries
                self._ranks.on_all(lambda: places.quarantine(progress.step))
            self.save(progress, loss)
        self._checkpointer.copy_last()
        self._report(self._checkpointer.close())
        return None

    def _report(self, reports: list[SaveReport]) -> None:
        for report in reports:
            if self._checkpointer is not None and report.url != self._checkpointer.url:
                self._report_copy(report)
                continue
            ok = report.ok or self._is_committed(report.step)
            self._num_failed = 0 if ok else self._num_failed + 1
            if ok and not report.ok:
                whose = "of an earlier start, or of another run that saves there"
                self._ranks.say(f"warning: step {report.step} is in {report.url}, perhaps {whose}: {report.error}")
            if report.warning:
                self._ranks.say(f"warning: step {report.step} is saved, but {report.warning}")
            self._log_save(report, "ok" if ok else "failed")
            if report.ok:  # on the first rank: committed
                self._ranks.say(f"step {report.step} is saved: {self._num_bytes / 1e6:,.1f} MB, {report.write_s:.1f} s")
            if not ok and self._leads:  # its report names the ranks that failed; the others only learned of it
                where = self._ranks.where([self._ranks.rank])
                log(f"warning: {where}the save of step {report.step} failed: {report.error}")

    def _log_save(self, report: SaveReport, how: str) -> None:
        self._counts[how] += 1
        texts = {name: text for name, text in (("error", report.error), ("warning", report.warning)) if text}
        self._log.event(
            "save", report.step, ok=how == "ok", stall_s=report.stall_s, write_s=report.write_s, bytes=self._num_bytes,
            num_attempts=report.num_attempts, counts=dict(self._counts), **texts,
        )  # fmt: skip

    def _report_copy(self, report: SaveReport) -> None:
        """Report how a step was copied to a slower tier. One that fails ends nothing: a dead tier holds no step up."""
        texts = {name: text for name, text in (("error", report.error), ("warning", report.warning)) if text}
        self._log.event("copy", report.step, ok=report.ok, url=report.url, write_s=report.write_s, **texts)
        if report.ok:
            self._ranks.say(f"step {report.step} is copied to {report.url}, {report.write_s:.1f} s")
        else:
            where = self._ranks.where([self._ranks.rank])
            log(f"warning: {where}step {report.step} was not copied to {report.url}: {report.error}")

    def _is_committed(self, step: int) -> bool:
        """Return whether a step is committed although its save failed.

        The writer of an earlier start may have been first.
        """
        try:
            return self._run is not None and self._run.is_committed(step, durably=True)
        except StorageError:
            return False
