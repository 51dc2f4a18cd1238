"""Passes: forward passes of an engine's stages over batches of any size, on one process or on a mesh."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ckptkit import Coords
from trainer.engine import Engine
from trainer.model.chunk import Chunk
from trainer.pipeline.actions import most_sends
from trainer.pipeline.executor import Executor
from trainer.pipeline.schedules import rank_actions

B = TypeVar("B")


class Passes(Generic[B]):
    """What a rank's stages compute of batches beside each other; every rank makes the same calls."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine whose tokens are not cut."""
        self.engine, self.mesh, self.layout = engine, engine.mesh, engine.mesh.layout
        self._shape_TD = 0, engine.config.model.hidden_size
        self._executor: Executor[B] = Executor(
            engine.link_of,
            lambda: torch.empty(self._shape_TD, dtype=engine.dtype, device=self.mesh.device),
            engine.store.wgrads,
            max_sends=most_sends(self.layout.pp, self.layout.num_stages),
        )

    @property
    def last_rank(self) -> int:
        """A rank that has the outputs."""
        return self.layout.rank(Coords(pp=self.layout.pp - 1))

    def run(
        self, num_tokens: int, forward: Callable[[Chunk], Callable[[Tensor | None, B], Tensor]], batches: Sequence[B]
    ) -> list[Tensor]:
        """Return the last stage's output of each batch, of so many tokens each; none on ranks of other stages."""
        self._shape_TD = num_tokens, self._shape_TD[1]
        actions = rank_actions("forward", self.layout.pp, len(batches), self.layout.virtual, self.mesh.coords.pp)
        chunks = {stage: forward(chunk) for stage, chunk in self.engine.chunks.items()}
        return self._executor.run(actions, chunks, batches)
