"""Evaluation: loss and perplexity on the first samples of validation sets, the same samples on any layout."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from datakit import HostBatch
from trainer.config import Config
from trainer.data import Int64s, harmless, spoilt, to_device, token_fault, with_vocabulary
from trainer.engine import Engine
from trainer.mesh.mesh import ProcessMesh
from trainer.model.microbatch import Batch
from trainer.run.environment import ranks_of
from trainer.run.inference import Checkpoint, TrainedModel
from trainer.run.loss_groups import NO_TAG, By, LossGroups, groups_of
from trainer.run.valid_sets import ValidSet, open_valid_sets


def evaluate_checkpoint(checkpoint: Checkpoint, by: By | None = None, only: Collection[str] = ()) -> dict[str, Any]:
    """Return loss and perplexity of a checkpoint on the validation sets, and which step it was.

    `by` sums losses apart too, by store or by tag; `only` names the sets to evaluate.
    """
    config = checkpoint.config
    with ranks_of(config) as ranks:
        ranks.on_all(lambda: with_vocabulary(config))
        model = TrainedModel(checkpoint, ranks)

        def opened() -> list["Evaluation"]:
            sets = open_valid_sets(config, ranks.say, only)
            groups = groups_of([valid_set.blend for valid_set in sets], by)
            return [Evaluation(config, model.engine, model.mesh, *pair) for pair in zip(sets, groups, strict=True)]

        evaluations = ranks.on_all(opened)
        results = {evaluation.valid_set.name: evaluation.run() for evaluation in evaluations}
        ranks.raise_on_all(next((each.fault for each in evaluations if each.fault), None))
        plain, step = results.pop("", {}), checkpoint.root.step
        return {"step": step, **plain, **({"sets": results} if results else {})}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation of a run's sets found: losses by their names in metadata, and the fields of its event."""

    losses: dict[str, float]
    event: dict[str, Any]

    @property
    def is_finite(self) -> bool:
        """Whether all losses are."""
        return all(map(math.isfinite, self.losses.values()))

    def __str__(self) -> str:
        texts = [f"{name.partition('/')[2]} {loss:.4f}".strip() for name, loss in self.losses.items()]
        return f"validation loss {', '.join(texts)}"


class Evaluations:
    """All validation sets of a run in training, checked once; every rank makes the same calls."""

    def __init__(self, config: Config, engine: Engine, mesh: ProcessMesh, report: Callable[[str], None]) -> None:
        """Open and check them; `report` takes lines on orders that only older runs have, and on rows read again."""
        self._all = [Evaluation(config, engine, mesh, valid_set) for valid_set in open_valid_sets(config, report)]

    @property
    def fault(self) -> Exception | None:
        """What this rank could not read in the last `run`; a loss is then not a number on any rank."""
        return next((evaluation.fault for evaluation in self._all if evaluation.fault), None)

    def run(self) -> Evaluated:
        """Evaluate all of them."""
        results = {evaluation.valid_set.loss_name: evaluation.run() for evaluation in self._all}
        losses = {name: float(result["loss"]) for name, result in results.items()}
        event = dict(next((result for name, result in results.items() if "/" not in name), {}))
        event |= {name: loss for name, loss in losses.items() if "/" in name}
        return Evaluated(losses, {**event, "eval_s": sum(result["eval_s"] for result in results.values())})


class Evaluation:
    """One validation set, checked once and read afresh by each `run`. Every rank makes the same calls.

    `fault` is what this rank could not read in the last `run`, whose loss is then not a number on any rank.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        mesh: ProcessMesh,
        valid_set: ValidSet,
        groups: LossGroups | None = None,
    ) -> None:
        """Check an open set, whose losses are summed by groups too."""
        self.fault: Exception | None = None
        self.valid_set = valid_set
        self._config, self._engine, self._mesh, self._groups = config, engine, mesh, groups
        self._blend, self._last = valid_set.blend, valid_set.num_samples - 1
        self._firsts = range(0, self._last + 1, config.train.global_batch_size)  # the first sample of each step
        for first in self._firsts:
            samples = np.minimum(self._samples(first), self._last)
            host = self._host(samples)
            self._has_bounds = host.cu_seqlens is not None
            fault = token_fault(host, samples, self._blend, config.model.vocab_size)
            if fault is not None:
                raise fault

    def run(self) -> dict[str, Any]:
        """Return the loss a token, perplexity, and what they were measured on, of all and of each group."""
        started, self.fault = time.perf_counter(), None
        sums = np.zeros((1 + self._num_groups, 2))
        for first in self._firsts:
            sums += np.reshape(self._engine.eval_batch(self._batch(first)), sums.shape)
        (loss_sum, num_tokens), *rows = sums.tolist()
        result: dict[str, Any] = {
            **_measured(loss_sum, max(num_tokens, 1.0)),
            "num_samples": self.valid_set.num_samples,
            "num_tokens": _count(num_tokens),
            "eval_s": time.perf_counter() - started,
        }
        if self._groups is not None:
            names = zip(self._groups.names, rows, strict=True)
            result[f"by_{self._groups.by}"] = [
                {self._groups.by: name or NO_TAG, **_measured(*row), "num_tokens": _count(row[1])}
                for name, row in names
                if name or row[1]
            ]
        return result

    @property
    def _num_groups(self) -> int:
        return 0 if self._groups is None else len(self._groups.names)

    def _samples(self, first: int) -> Int64s:
        """Return the numbers of this rank's rows in the step from `first` on; the last ones may be past the end."""
        train, dp = self._config.train, self._config.parallel.dp
        microbatches = np.arange(train.gradient_accumulation_steps)[:, None] * dp + self._mesh.coords.dp
        return (first + microbatches * train.micro_batch_size + np.arange(train.micro_batch_size)).ravel()

    def _host(self, samples: Int64s) -> HostBatch:
        out = np.empty(HostBatch.num_bytes((samples.size, self._blend.seq_length)), np.uint8)  # with a mask to change
        return self._blend.batch(samples, self._config.data.batch_options, out=out)

    def _batch(self, first: int) -> Batch:
        """Return this rank's rows of the samples from `first` on; rows past the last sample carry no loss."""
        train, samples = self._config.train, self._samples(first)
        shape = train.gradient_accumulation_steps, train.micro_batch_size, train.seq_length
        read, groups = np.minimum(samples, self._last), np.zeros(shape, np.int64)  # a stream may have no more
        try:
            host = self._host(read)
            if self._groups is not None:
                groups[:] = self._groups.labels.of(read).reshape(shape)
        except Exception as error:  # the other ranks read theirs, and learn of it from the loss
            self.fault = self.fault or error
            return self._grouped(spoilt(to_device(self._harmless(shape, first), self._mesh.device)), groups)
        host.loss_mask[samples > self._last] = 0.0
        batch = to_device(host.reshaped(*shape, first_sample=first, epochs=()), self._mesh.device)
        return self._grouped(batch, groups)

    def _harmless(self, shape: tuple[int, int, int], first: int) -> HostBatch:
        return harmless(shape, first, has_bounds=self._has_bounds)

    def _grouped(self, batch: Batch, groups: Int64s) -> Batch:
        if self._groups is None:
            return batch
        numbers = torch.from_numpy(groups).to(self._mesh.device)
        return dataclasses.replace(batch, groups=numbers, num_groups=self._num_groups)


def _measured(loss_sum: float, num_tokens: float) -> dict[str, float | None]:
    """Return loss and perplexity of tokens; None of no tokens."""
    if not num_tokens:
        return {"loss": None, "perplexity": None}
    loss = loss_sum / num_tokens
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def _count(num_tokens: float) -> int:
    return int(num_tokens) if math.isfinite(num_tokens) else 0
