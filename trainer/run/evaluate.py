"""Evaluation: loss and perplexity on the first samples of the validation blend, the same samples on any layout."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from datakit import HostBatch
from trainer.config import Config
from trainer.data import Int64s, harmless, open_valid_blend, spoilt, to_device, token_fault, with_vocabulary
from trainer.engine import Engine
from trainer.mesh.mesh import ProcessMesh
from trainer.model.microbatch import Batch
from trainer.run.environment import ranks_of
from trainer.run.inference import Checkpoint, TrainedModel


def evaluate_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return loss and perplexity of a checkpoint on the validation set, and which step it was."""
    config = checkpoint.config
    with ranks_of(config) as ranks:
        ranks.on_all(lambda: with_vocabulary(config))
        model = TrainedModel(checkpoint, ranks)
        evaluation = ranks.on_all(lambda: Evaluation(config, model.engine, model.mesh, ranks.say))
        result = evaluation.run()
        ranks.raise_on_all(evaluation.fault)
        return {"step": checkpoint.root.step, **result}


class Evaluation:
    """The validation set of a run, checked once and read afresh by each `run`. Every rank makes the same calls.

    `fault` is what this rank could not read in the last `run`, whose loss is then not a number on any rank.
    """

    def __init__(
        self, config: Config, engine: Engine, mesh: ProcessMesh, report: Callable[[str], None] = lambda _: None
    ) -> None:
        """Open and check it; `report` takes a line on an order that only older runs have."""
        self.fault: Exception | None = None
        self._config, self._engine, self._mesh = config, engine, mesh
        self._blend, self._last = open_valid_blend(config, report), config.data.valid.num_samples - 1
        self._firsts = range(0, self._last + 1, config.train.global_batch_size)  # the first sample of each step
        for first in self._firsts:
            samples = np.minimum(self._samples(first), self._last)
            host = self._host(samples)
            self._has_bounds = host.cu_seqlens is not None
            fault = token_fault(host, samples, self._blend, config.model.vocab_size)
            if fault is not None:
                raise fault

    def run(self) -> dict[str, Any]:
        """Return the loss a token, perplexity, and what they were measured on."""
        started, self.fault = time.perf_counter(), None
        loss_sum, num_tokens = 0.0, 0.0
        for first in self._firsts:
            found = self._engine.eval_batch(self._batch(first))
            loss_sum, num_tokens = loss_sum + found[0], num_tokens + found[1]
        loss = loss_sum / max(num_tokens, 1.0)
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "num_samples": self._config.data.valid.num_samples,
            "num_tokens": int(num_tokens) if math.isfinite(num_tokens) else 0,
            "eval_s": time.perf_counter() - started,
        }

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
        try:
            host = self._host(np.minimum(samples, self._last))  # a stream may have no more
        except Exception as error:  # the other ranks read theirs, and learn of it from the loss
            self.fault = self.fault or error
            return spoilt(to_device(harmless(shape, first, has_bounds=self._has_bounds), self._mesh.device))
        host.loss_mask[samples > self._last] = 0.0
        return to_device(host.reshaped(*shape, first_sample=first, epochs=()), self._mesh.device)
