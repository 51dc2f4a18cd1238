"""Bench: a small run with its stores, and its trials, each made once."""

from copy import copy
from dataclasses import replace
from pathlib import Path

from trainer.config import Config, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.verify.shrink import Shrunk
from trainer.verify.trial import SavedStep, Stream, Trial, read_stream, save_trial, try_steps, with_stores

NUM_STEPS, SAVED_AT = 4, 2


class Bench:
    """A small run with its stores, whose trials the checks share; owned by the command's thread."""

    def __init__(self, small: Shrunk, run: Config, folder: Path, saved: SavedStep | None = None) -> None:
        """Write the stores in a folder that only this bench uses; `run` is the run itself, `saved` a step of it."""
        self.run, self.folder, self.saved = run, folder, saved
        self.config = with_stores(small.config, folder)
        self._forget()

    @classmethod
    def of_stores(cls, config: Config, run: Config, folder: Path) -> "Bench":
        """Return a bench of a small run whose stores are there."""
        bench = cls.__new__(cls)
        bench.config, bench.run, bench.folder, bench.saved = config, run, folder, None
        bench._forget()
        return bench

    @classmethod
    def beside(cls, bench: "Bench", config: Config) -> "Bench":
        """Return a bench of another small run over the same stores."""
        other = copy(bench)
        other.config = config
        other._forget()
        return other

    def _forget(self) -> None:
        self._trials: dict[tuple[int, bool], Trial] = {}
        self._stream: Stream | None = None
        self._whole_stream: Stream | None = None
        self._start: SavedStep | None = None

    @property
    def alone(self) -> Config:
        """Return the same run on one process, with the same micro-batches."""
        return alone_of(self.config)

    @property
    def stream(self) -> Stream:
        """Return the batches of all ranks."""
        if self._stream is None:
            self._stream = read_stream(self.config, NUM_STEPS)
        return self._stream

    @property
    def whole_stream(self) -> Stream:
        """Return the batches of one process."""
        if self._whole_stream is None:
            self._whole_stream = read_stream(self.alone, NUM_STEPS)
        return self._whole_stream

    def trial(self, num_steps: int = NUM_STEPS, *, alone: bool = False) -> Trial:
        """Return a trial of so many steps, of the layout or of one process, made at the first call."""
        key = num_steps, alone
        if key not in self._trials:
            config, stream = (self.alone, self.whole_stream) if alone else (self.config, self.stream)
            self._trials[key] = try_steps(config, stream, num_steps)
        return self._trials[key]

    @property
    def layout(self) -> Trial:
        """Return the trial of the run's layout."""
        return self.trial()

    @property
    def reference(self) -> Trial:
        """Return the trial of one process."""
        return self.trial(alone=True)

    @property
    def start(self) -> SavedStep:
        """Return the step that the layout saves in the middle of its trial."""
        if self._start is None:
            self._start = save_trial(self.trial(SAVED_AT), str(self.folder / "run"), SAVED_AT, self.stream)
        return self._start


def alone_of(config: Config) -> Config:
    """Return a run on one process, with the same micro-batches."""
    train = replace(nothing_again(config.train), gradient_accumulation_steps=0)
    return resolve(replace(config, parallel=ParallelConfig(dp=1), train=train), 1)


def nothing_again(train: TrainConfig) -> TrainConfig:
    """Return the options of a run whose backward makes nothing again."""
    plain = TrainConfig()
    names = ("recompute", "recompute_modules", "recompute_num_layers", "recompute_keep", "recompute_offload")
    return replace(train, **{name: getattr(plain, name) for name in names})
