"""Decoder: a model that reads rows of tokens and chooses the next one of each, on one process or on a mesh.

Each rank keeps keys and values of its own layers and heads. With pipeline stages rows go through in as many parts,
beside each other. One rank chooses and all others take its choice, so ranks never part: the logits of others may
differ from its own in the last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.config import Config, Fp8Config
from trainer.engine import Engine
from trainer.model.cache import KeyValueCache, Turn
from trainer.model.chunk import Chunk
from trainer.run.passes import Passes

PROMPT_TOKENS = 4096  # of prompts that are read in one pass, unless one alone has more
Choose = Callable[[Tensor], Tensor]  # the next token of each row, from logits [B, vocabulary]


def for_decoding(config: Config) -> Config:
    """Return the configuration of a model that decodes: tokens are not cut, nothing is made again or in eight bits.

    A scale of eight bits may be one of all tokens of a pass, and rows would then depend on the others of a batch.
    UserError for a layout whose ranks would have nothing to do.
    """
    parallel = config.parallel
    if parallel.cp > 1:
        raise UserError(f"texts are not cut over ranks, and cp is {parallel.cp}", hint="--cp 1")
    if parallel.dp > 1 and parallel.ep == 1:
        num_ranks = parallel.tp * parallel.pp
        raise UserError(
            f"{parallel.dp} times as many processes as tp {parallel.tp} and pp {parallel.pp} take would do the same",
            hint=f"trainer launch --nproc-per-node {num_ranks} ..., or --tp {parallel.tp * parallel.dp}",
        )
    train = replace(config.train, recompute="none")
    return replace(config, parallel=replace(parallel, sequence_parallel="off"), train=train, fp8=Fp8Config())


class Decoder:
    """The rows of one batch under way; every rank makes the same calls. Decoders of an engine may take turns."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine whose configuration is `for_decoding`."""
        self.engine, self.mesh, self.layout = engine, engine.mesh, engine.mesh.layout
        self.cache: KeyValueCache
        self.lengths = list[int]()
        self._passes: Passes[Turn] = Passes(engine)

    def begin(self, prompts: Sequence[Sequence[int]], choose: Choose, *, most_tokens: int) -> list[int]:
        """Read the prompts of new rows, of which none will have more tokens; return the next token of each."""
        layers = [block.attention for chunk in self.engine.chunks.values() for block in chunk.blocks]
        self.cache = KeyValueCache(layers, len(prompts), most_tokens, self.engine.dtype, self.mesh.device)
        self.lengths = [0] * len(prompts)
        logits = [out for rows in _groups(list(map(len, prompts))) for out in self._read(prompts, [rows])]
        return self._chosen(logits, choose)

    def next(self, tokens: Sequence[int], choose: Choose) -> list[int]:
        """Read one further token of each row; return the next ones."""
        num_parts = gcd(len(tokens), self.layout.pp)
        size = len(tokens) // num_parts
        parts = [range(part * size, (part + 1) * size) for part in range(num_parts)]
        return self._chosen(self._read([[token] for token in tokens], parts), choose)

    def leave(self, row: int) -> None:
        """End a row: the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            self.cache.move(last, row)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    @torch.inference_mode()
    def _read(self, tokens: Sequence[Sequence[int]], parts: Sequence[range]) -> list[Tensor]:
        """Return the logits behind some rows' tokens, if this rank has the head; parts have as many tokens each."""
        turns = [
            Turn.of(rows, self.lengths[rows.start : rows.stop], tokens[rows.start : rows.stop], self.mesh.device)
            for rows in parts
        ]
        with self.cache.attached():
            logits = self._passes.run(len(turns[0].batch.tokens_S), self._forward, turns)
        for turn in turns:
            for row, count in zip(turn.rows, turn.counts, strict=True):
                self.lengths[row] += count
        return logits

    def _forward(self, chunk: Chunk) -> Callable[[Tensor | None, Turn], Tensor]:
        def forward(received_TD: Tensor | None, turn: Turn) -> Tensor:
            self.cache.turn = turn
            if chunk.head is None:
                return chunk.forward(received_TD, turn.batch)
            return chunk.logits(received_TD, turn.batch, turn.last_B)

        return forward

    def _chosen(self, logits: list[Tensor], choose: Choose) -> list[int]:
        chooser = self._passes.last_rank
        if self.mesh.rank == chooser:
            tokens_B = choose(torch.cat(logits)).to(self.mesh.device)
        else:
            tokens_B = torch.empty(len(self.lengths), dtype=torch.int64, device=self.mesh.device)
        return self.mesh.world.broadcast(tokens_B, chooser).tolist()


def _groups(counts: Sequence[int]) -> list[range]:
    """Return neighbouring rows that are read together: of 3,000, 1,000 and 500 tokens the first two, then the last."""
    groups, start, size = [], 0, 0
    for row, count in enumerate(counts):
        if row > start and size + count > PROMPT_TOKENS:
            groups.append(range(start, row))
            start, size = row, 0
        size += count
    return [*groups, range(start, len(counts))]
