"""Scorer: log-likelihoods of the ends of rows of tokens, on one process or on a mesh.

Rows are read beside each other without padding, each a document of its own, so what a row is scored depends on no other
but in the last bits. With pipeline stages as many batches are under way, filled up to the same size by a document more.
Softmax is in float32, in float64 of a model in that precision.

Letters beside those of blocks: K tokens that are scored, of the S of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.engine import Engine
from trainer.model.chunk import Chunk
from trainer.model.microbatch import MicroBatch
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.cross_entropy import tokens_at_once
from trainer.run.passes import Passes

MOST_TOKENS = 4096  # of rows that are read in one pass, unless one alone has more


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Tokens, of which the last `num_scored` are scored after those before them: at least one is not."""

    tokens: Sequence[int]
    num_scored: int


@dataclass(frozen=True, slots=True)
class Score:
    """The log-likelihood of a row's end, and whether each of its tokens is the likeliest one."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one pass, and which of their tokens predict what is scored."""

    batch: MicroBatch
    places_K: Tensor
    labels_K: Tensor

    @classmethod
    def of(cls, rows: Sequence[ScoredRow], num_tokens: int, device: torch.device) -> "Part":
        """Return the part of some rows, filled up to so many tokens.

        Of the row 5, 6, 7 whose last two are scored, 5 and 6 are read, and predict 6 and 7.
        """
        assert all(row.num_scored < len(row.tokens) for row in rows), "each scored token has one before it"
        inputs = [list(row.tokens[:-1]) for row in rows]
        if (left := num_tokens - sum(map(len, inputs))) > 0:
            inputs.append([0] * left)
        bounds = torch.tensor([0, *map(len, inputs)]).cumsum(0)
        flat = [token for row in inputs for token in row]
        positions = [place for row in inputs for place in range(len(row))]
        ends = bounds.tolist()[1:]
        places = [place for row, end in zip(rows, ends) for place in range(end - row.num_scored, end)]
        labels = [token for row in rows for token in row.tokens[len(row.tokens) - row.num_scored :]]
        tokens_S, positions_S = torch.tensor([flat, positions], device=device)
        documents = bounds.to(device, torch.int32), max(map(len, inputs))
        batch = MicroBatch(
            tokens_S, tokens_S, positions_S, positions_S, len(flat), (range(len(flat)),), None, documents=documents
        )
        return cls(batch, *torch.tensor([places, labels], device=device))


class Scorer:
    """Scores rows with an engine whose configuration is `for_decoding`; every rank makes the same calls."""

    def __init__(self, engine: Engine, *, batch_size: int = 16) -> None:
        """Read at most `batch_size` rows in one pass."""
        self.engine, self._batch_size = engine, batch_size
        self._passes: Passes[Part] = Passes(engine)

    def score(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Return the score of each row, on all ranks."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens))  # alike ones go together
        scores: dict[int, Score] = {}
        groups = list(self._groups(order, rows))
        pp = self.engine.mesh.layout.pp
        for first in range(0, len(groups), pp):
            numbers = [number for group in groups[first : first + pp] for number in group]
            found = self._score([[rows[number] for number in group] for group in groups[first : first + pp]])
            scores |= zip(numbers, found, strict=True)
        return [scores[number] for number in range(len(rows))]

    def _groups(self, order: Sequence[int], rows: Sequence[ScoredRow]) -> Iterator[list[int]]:
        """Yield numbers of rows that are read in one pass."""
        group, size = list[int](), 0
        for number in order:
            num_tokens = len(rows[number].tokens) - 1
            if group and (len(group) == self._batch_size or size + num_tokens > MOST_TOKENS):
                yield group
                group, size = [], 0
            group.append(number)
            size += num_tokens
        if group:
            yield group

    @torch.inference_mode()
    def _score(self, groups: Sequence[Sequence[ScoredRow]]) -> list[Score]:
        mesh = self.engine.mesh
        num_tokens = max(sum(len(row.tokens) - 1 for row in group) for group in groups)
        parts = [Part.of(group, num_tokens, mesh.device) for group in groups]
        scored = self._passes.run(num_tokens, self._forward, parts)
        counts = [row.num_scored for group in groups for row in group]
        if mesh.rank == self._passes.last_rank:
            scored_2K = torch.cat(scored, 1)
        else:
            scored_2K = torch.empty((2, sum(counts)), dtype=torch.float64, device=mesh.device)
        mesh.world.broadcast(scored_2K, self._passes.last_rank)
        rows = scored_2K.cpu().split(counts, 1)
        return [Score(float(row_2K[0].sum()), bool(row_2K[1].all())) for row_2K in rows]

    def _forward(self, chunk: Chunk) -> Callable[[Tensor | None, Part], Tensor]:
        def forward(received_TD: Tensor | None, part: Part) -> Tensor:
            if chunk.head is None:
                return chunk.forward(received_TD, part.batch)
            x_TD, branch_TD = chunk.hidden(received_TD, part.batch)
            config = self.engine.config
            num_bytes = config.model.vocab_size * wide_dtype(x_TD.dtype).itemsize
            size = tokens_at_once(len(part.places_K), num_bytes, config.train.max_logits_gib * 2**30)
            scored = []
            for places, labels in zip(part.places_K.split(size), part.labels_K.split(size), strict=True):
                logits = chunk.head.logits(x_TD[places], None if branch_TD is None else branch_TD[places])
                logprobs = torch.log_softmax(logits.to(wide_dtype(logits.dtype)), -1)
                own = logprobs.gather(1, labels.unsqueeze(1)).squeeze(1)
                scored.append(torch.stack([own.double(), (logits.argmax(-1) == labels).double()]))
            return torch.cat(scored, 1)

        return forward
