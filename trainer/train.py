"""The training loop: resume, step, log, save; the same code on one process and on many."""

import dataclasses
import resource
import secrets
import signal
import time
from types import FrameType

import torch

from threefold.errors import UserError
from trainer.config import Config
from trainer.config_check import layout_of
from trainer.data import open_blend, open_loader, to_device, with_vocabulary
from trainer.engine import Batch, Engine, StepStats
from trainer.evaluate import Evaluation
from trainer.flops import peak_flops, token_flops
from trainer.mesh import ProcessMesh
from trainer.metrics import Log, StepMetrics, throughput
from trainer.ranks import Ranks
from trainer.saver import Saver
from trainer.state import Progress, Validation, resume


def train(config: Config) -> int:
    """Train until the last step, the last epoch or a SIGTERM, save, and return the exit code 0."""
    with StopRequest() as stop, Ranks(config.train.device, timeout_s=config.parallel.timeout_s) as ranks:
        run = Run(ranks.together(lambda: with_vocabulary(config)), ranks, stop)
        while run.goes_on:
            ranks.here(run.step)
        ranks.here(run.finish)
    return 0


class StopRequest:
    """Notes a SIGTERM, inside a `with`, instead of dying of it; a second one is obeyed as usual."""

    requested = False

    def __enter__(self) -> "StopRequest":
        self._usual = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._usual)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, self._usual)


class Run:
    """One start of a run: everything from the resumed step on. Every rank makes the same calls."""

    def __init__(self, config: Config, ranks: Ranks, stop: StopRequest) -> None:
        """Build this rank's part of the model, resume, and open data, log and checkpointer."""
        self.config, self.ranks, self._stop = config, ranks, stop
        blend = ranks.together(lambda: open_blend(config.data, config, name="data"))
        self.mesh = ProcessMesh(layout_of(config), ranks.rank, ranks.device)
        self.engine = ranks.together(lambda: Engine(config, self.mesh))
        resumed = resume(ranks, self.engine, config)
        self.progress, self._loss = resumed.progress, resumed.loss
        dp_rank = self.mesh.coords.dp
        self._loader = ranks.together(lambda: open_loader(blend, config, dp_rank, self.progress.cursor))
        self._log = ranks.together(self._open_log)
        if resumed.url:
            self._log.event("resume", self.progress.step, url=resumed.url)
        saved_step = self.progress.step if resumed.is_own else None
        attempt = ranks.broadcast(secrets.token_hex(8))
        self._saver = ranks.together(
            lambda: Saver(
                config, ranks, self.engine, self._log, attempt=attempt, saved_step=saved_step, newest=resumed.newest
            )
        )
        self._evaluation = (
            ranks.together(lambda: Evaluation(config, self.engine, self.mesh)) if config.train.eval_interval else None
        )
        self._flops = token_flops(config)
        self._peak = peak_flops(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None
        self._epochs = blend.epochs(self._loader.cursor.num_samples)
        self._stopping = False

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to do."""
        last_epoch = self.config.data.max_epochs
        ended = last_epoch > 0 and max(self._epochs) >= last_epoch
        return self.progress.step < self.config.train.train_steps and not ended and not self._stopping

    def step(self) -> None:
        """Read, train, save where due, log."""
        ranks, train, started = self.ranks, self.config.train, time.perf_counter()
        host = self._loader.next_step()
        batch = to_device(host, ranks.device)
        data_wait_s = time.perf_counter() - started
        stats = self._train_step(batch)
        num_tokens = train.global_batch_size * train.seq_length
        validation = None if self._saver.falls_due(self.progress.step) else self.progress.validation
        self.progress = Progress(
            self.progress.step + 1, self.progress.tokens + num_tokens, self._loader.cursor.to_json(), validation
        )
        self._loss = stats.loss
        eval_s = self._evaluate()  # before the save, which records it
        if self._saver.due(self.progress.step):
            self._saver.save(self.progress, stats.loss)
        failed_saves, is_busy = self._saver.poll(), self._saver.is_busy
        memory_gib = peak_memory_gib(ranks.device)
        data_wait_s, comm_s, bubble_s, stall_s, memory_gib, failed, stopping, is_any_busy = ranks.maximum(
            [
                data_wait_s, stats.comm_s, stats.bubble_s, self._saver.take_stall(), memory_gib, failed_saves,
                float(self._stop.requested), float(is_busy),
            ]
        )  # fmt: skip
        self._saver.agree_busy(bool(is_any_busy))
        step_s = time.perf_counter() - started - eval_s
        self._log.step(
            StepMetrics(
                step=self.progress.step,
                loss=stats.loss,
                grad_norm=stats.grad_norm,
                lr=stats.lr,
                tokens=self.progress.tokens,
                step_s=step_s,
                data_wait_s=data_wait_s,
                comm_s=comm_s,
                bubble_s=bubble_s,
                checkpoint_stall_s=stall_s,
                memory_gib=memory_gib,
                **throughput(
                    num_tokens=num_tokens,
                    num_samples=train.global_batch_size,
                    step_s=step_s,
                    world_size=ranks.world_size,
                    flops=self._flops,
                    peak=self._peak,
                ),
            )
        )
        self._announce(host.epochs)
        self._saver.check(int(failed))
        self._stopping = bool(stopping)

    def finish(self) -> None:
        """Save the last step, wait for it, and close everything."""
        self._saver.finish(self.progress, self._loss)
        self._loader.close()
        self.ranks.say(f"{'stopped by SIGTERM' if self._stopping else 'done'} after step {self.progress.step}")
        self._log.close()

    def _train_step(self, batch: Batch) -> StepStats:
        try:
            return self.engine.train_step(self.progress.step, batch, before_update=self._saver.join)
        except UserError as error:  # a loss that is not finite, which all ranks see
            self.ranks.agree(error)
            raise

    def _open_log(self) -> Log:
        config = self.config
        return Log(
            config.log.metrics,
            train_steps=config.train.train_steps,
            interval=config.log.interval,
            start_step=self.progress.step,
            active=self.ranks.rank == 0,
        )

    def _announce(self, epochs: tuple[int, ...]) -> None:
        """Tell that stores were read whole once more."""
        for path, before, after in zip(self.config.data.stores, self._epochs, epochs, strict=True):
            if after > before:
                self._log.event("epoch", self.progress.step, store=path, epochs=after)
                self._log.say(f"step {self.progress.step}: epoch {after} of {path} is read")
        self._epochs = epochs

    def _evaluate(self) -> float:
        """Evaluate where it is due; gives the seconds that took."""
        if self._evaluation is None or self.progress.step % self.config.train.eval_interval:
            return 0.0
        started = time.perf_counter()
        result = self._evaluation.run()
        self.progress = dataclasses.replace(
            self.progress, validation=Validation(self.progress.step, float(result["loss"]))
        )
        self._log.event("eval", self.progress.step, **result)
        self._log.say(f"step {self.progress.step}: validation loss {result['loss']:.4f}")
        return time.perf_counter() - started


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process ever held: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
