"""Health: what a run says of ranks that hang or are slow, on the console, in its metrics and in files."""

from pathlib import Path
from time import strftime

from threefold.cli import log
from trainer.config import Config
from trainer.job.flight import default_folder
from trainer.job.ranks import Ranks
from trainer.job.stall import Stall
from trainer.observe.metrics import Log
from trainer.observe.stragglers import Stragglers


class Health:
    """A run's view of its ranks; stalls are seen by a thread, stragglers by the one that trains."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Begin this rank's page, and the watch; all ranks make this call."""
        health = config.health
        self._ranks, self._folder = ranks, Path(health.path or default_folder(config.log.metrics))
        self._timeout_s = config.parallel.timeout_s
        self.log: Log | None = None  # once it is open
        self._stragglers = Stragglers(health.straggler_share, health.straggler_steps)
        ranks.begin_page(str(self._folder))
        if health.stall_s:
            ranks.begin_watch(health.stall_s, self._report)

    def note_step(self, step: int, own_s: float) -> None:
        """Note what the last step took of this rank without its waits; all ranks call it, and compare now and then."""
        if self._stragglers.add(own_s) and self._ranks.world_size > 1:
            self._say(step, self._stragglers.compare(self._ranks.gather(self._stragglers.take())))

    @property
    def summary(self) -> str:
        """Return which ranks were slow in the run, as the end of a line; empty if none were."""
        return f"; {text}" if (text := self._stragglers.summary) else ""

    def _say(self, step: int, slow: dict[int, float]) -> None:
        for rank, share in slow.items():
            text = f"rank {rank} is slow: its own work takes {share:.0%} longer than the median of the others"
            self._ranks.say(f"step {step}: {text}, over {self._stragglers.num_steps} steps")
            if self.log is not None:
                self.log.event("straggler", step, rank=rank, slower_by=round(share, 4))

    def _report(self, stall: Stall) -> None:
        """Report a stall; the watching thread calls it, on one rank."""
        hint = f"hint: {stall.hint}; ranks that wait end by themselves after {self._timeout_s:g} s (parallel.timeout_s)"
        text = "\n  ".join([f"stall: {stall.lines[0]}", *stall.lines[1:]]) + f"\n{hint}"
        log(f"{text}\nthis report is also in {path}" if (path := self._write(stall, text)) else text)
        if self.log is not None:
            self.log.event("stall", stall.step, **stall.to_event())

    def _write(self, stall: Stall, text: str) -> Path | None:
        path = self._folder / f"stall-step-{stall.step:09}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{strftime('%Y-%m-%d %H:%M:%S %z')}\n{text}\n", encoding="utf-8")
        except OSError:
            return None
        return path
