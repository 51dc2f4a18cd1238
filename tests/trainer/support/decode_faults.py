"""Faults of generation with what is kept of earlier tokens, by name: tokens or logits must then differ."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from trainer.model import cache
from trainer.model.cache import KeyValueCache, Slots, Turn
from trainer.run.decoder import Decoder

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class DecodeFault:
    """What is wrong, how to plant it, and the model and layout that show it."""

    name: str
    plant: Callable[[Patch], None]
    model: str = "llama"
    layout: str = "tp1"


def changing_slots(change: Callable[[Slots], Slots]) -> Callable[[Patch], None]:
    """Change where further tokens go, or what they see."""
    real = Slots.of.__func__  # type: ignore[attr-defined]

    def plant(patch: Patch) -> None:
        patch.setattr(Slots, "of", classmethod(lambda cls, *args: change(real(cls, *args))))

    return plant


def without_last_slot(slots: Slots) -> Slots:
    return replace(slots, num_used=slots.num_used - 1, used_B11L=None) if slots.num_used > 1 else slots


def shifting_places(patch: Patch) -> None:
    """Let further tokens have the place of the one before."""
    real = Turn.of.__func__  # type: ignore[attr-defined]

    def of(cls, rows, starts, tokens, device):
        turn = real(cls, rows, starts, tokens, device)
        batch = replace(turn.batch, positions_S=(turn.batch.positions_S - int(any(starts))).clamp(min=0))
        return replace(turn, batch=batch)

    patch.setattr(Turn, "of", classmethod(of))


def first_window_kept(patch: Patch) -> None:
    """Keep the first tokens of a prompt that is longer than a window, in place of the last."""
    patch.setattr(cache.LayerCache, "_first", _keeping_first(cache.LayerCache._first))


def _keeping_first(real):
    def first(self, row, q, k, v, window, backend):
        out = real(self, row, q, k, v, window, backend)
        size = self.k_BKLH.shape[2]
        self.k_BKLH[row, :, : min(size, len(k))] = k[:size].transpose(0, 1)
        return out

    return first


def keeping_lengths(patch: Patch) -> None:
    """Let a row that takes the place of another keep the other's length."""
    real = Decoder.leave

    def leave(self: Decoder, row: int) -> None:
        length = self.lengths[row]
        real(self, row)
        if row < len(self.lengths):
            self.lengths[row] = length

    patch.setattr(Decoder, "leave", leave)


def choosing_by_rank(patch: Patch) -> None:
    """Let each rank take a token of its own."""

    def chosen(self: Decoder, logits: list[torch.Tensor], choose: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        zeros = [0] * len(self.lengths)
        return choose(torch.cat(logits)).tolist() if logits and self.mesh.rank else zeros

    patch.setattr(Decoder, "_chosen", chosen)


def leaving_slots_unwritten(patch: Patch) -> None:
    """Let a slot that no token is in hold no number."""
    real = KeyValueCache.__init__

    def init(self: KeyValueCache, *args: Any) -> None:
        real(self, *args)
        for layer in self.layers:
            layer.k_BKLH.fill_(torch.nan)
            layer.v_BKLH.fill_(torch.nan)

    patch.setattr(KeyValueCache, "__init__", init)


DECODE_FAULTS = [
    DecodeFault("slots without a token hold no number", leaving_slots_unwritten),
    DecodeFault("the token itself is not seen", changing_slots(without_last_slot)),
    DecodeFault("rows see slots of longer rows", changing_slots(lambda slots: replace(slots, used_B11L=None))),
    DecodeFault(
        "a window keeps on writing behind its end",
        changing_slots(lambda slots: replace(slots, number=slots.number * 0)),
        "windows",
    ),
    DecodeFault("places are one behind", shifting_places),
    DecodeFault("a window keeps the begin of a prompt", first_window_kept, "windows"),
    DecodeFault("a row that ends is not replaced", lambda patch: patch.setattr(KeyValueCache, "move", lambda *_: None)),
    DecodeFault("a row keeps the length of another", keeping_lengths),
    DecodeFault("each rank chooses for itself", choosing_by_rank, layout="tp2"),
]
