"""Rows that are continued by any layout, against plain torch, which reads the whole row again for each token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.moe import mixture
from tests.trainer.support.parity import config_for, make_engine, small
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.run.decoder import Decoder, for_decoding
from trainer.verify import plain_model
from trainer.verify.threads import run_threads
from trainer.verify.whole import assembled, copied

PROMPTS = [[7, 3, 5], [11], [4, 4, 9, 1, 2, 8, 60], [1, 2, 3, 4], [60, 59]]
LEAVES = {2: 1, 4: 0}  # before a step, which row ends: the last one takes its place
NUM_TOKENS, WITHIN = 7, 1e-9
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "windows": ("llama", {"window": 4, "window_every": 2, "num_kv_heads": 4}),
    "soft cap": ("gpt2", {"logit_softcap": 0.7}),
    "windows of one": ("llama", {"window": 1, "qk_norm": False}),
    "alibi": ("llama", {"position": "alibi", "num_kv_heads": 4}),
    "alibi in windows": ("llama", {"position": "alibi", "window": 4, "window_every": 2}),
    "no positions": ("llama", {"position": "none", "norm": "layernorm", "bias": True}),
}


def decoding(name: str, layout: str, precision: str) -> Config:
    """The configuration of a model with large weights, whose likeliest tokens differ."""
    if name == "experts":
        config = mixture("shared", layout)
    else:
        base, shape = SHAPES[name]
        config = small(config_for(base, ParallelLayout.parse(layout)))
        config = replace(config, model=replace(config.model, **{"init_std": 0.3, "num_layers": 4, **shape}))
    return for_decoding(replace(config, train=replace(config.train, precision=precision, recompute="full")))


def decode(rank: int, config: Config, *, network: Network | None = None) -> list[list[tuple[int, int, list[float]]]]:
    """Each step's rows: the number of the prompt, the likeliest token, and the logits, if this rank chooses."""
    decoder = Decoder(make_engine(rank, config, network=network))
    steps, logits = list[list[tuple[int, int, list[float]]]](), list[Tensor]()

    def choose(logits_BV: Tensor) -> Tensor:
        logits.append(logits_BV)
        return logits_BV.argmax(-1)

    rows = list(range(len(PROMPTS)))
    tokens = decoder.begin(PROMPTS, choose, most_tokens=len(max(PROMPTS, key=len)) + NUM_TOKENS)
    for step in range(1, NUM_TOKENS):
        seen = logits.pop().tolist() if logits else [[]] * len(rows)
        steps.append(list(zip(rows, tokens, seen, strict=True)))
        if step in LEAVES:
            place = LEAVES[step]
            decoder.leave(place)
            rows[place], tokens[place] = rows[-1], tokens[-1]
            del rows[-1], tokens[-1]
        tokens = decoder.next(tokens, choose)
    return steps


@cache
def state_of(config: Config) -> dict[str, Tensor]:
    """The parameters of a run, whole."""
    engine = make_engine(0, config)
    pieces = copied(piece for piece in saved_pieces(engine.store) if not piece.name.startswith("optim."))
    infos = [info for info in tensor_table(engine.table, engine.dtype) if not info.name.startswith("optim.")]
    return {name: value.double() for name, value in assembled(infos, pieces).items()}


def compare_decoding(name: str, layout: str = "tp1", precision: str = "fp64") -> None:
    """Every rank's tokens are the likeliest by plain torch, and in float64 the logits are its own."""
    config = decoding(name, layout, precision)
    num_ranks = layout_of(config).world_size
    runs: list[Any] = [decode(0, config)] if num_ranks == 1 else run_threads(num_ranks, decode, config)
    state, rows = state_of(decoding(name, "tp1", precision)), [list(prompt) for prompt in PROMPTS]
    for number, step in enumerate(runs[-1]):
        for prompt, token, logits in step:
            expected = uncached(config, state, rows[prompt])
            require_equal(token == int(expected.argmax()), f"token {number} of prompt {prompt}")
            if precision == "fp64" and logits:
                gap = float((torch.tensor(logits, dtype=torch.float64) - expected).abs().max())
                require_equal(gap < WITHIN, f"logits of token {number} of prompt {prompt} differ by {gap:.1e}")
            rows[prompt].append(token)
    for rank, run in enumerate(runs):
        for step, others in zip(run, runs[-1], strict=True):
            require_equal([row[:2] for row in step] == [row[:2] for row in others], f"tokens of rank {rank}")
    choosers = [rank for rank, run in enumerate(runs) if run[0][0][2]]
    require_equal(len(choosers) == 1, f"ranks {choosers} choose")


def uncached(config: Config, state: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """The logits behind a row, all of which is computed."""
    tokens_BS = torch.tensor([list(tokens)])
    positions_BS = torch.arange(len(tokens)).unsqueeze(0)
    return plain_model.logits(config.model, state, tokens_BS, positions_BS, lambda x, **_: x)[0, -1]
