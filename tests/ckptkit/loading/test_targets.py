"""Memory of devices is filled through the bounded buffer, with few copies; a stand-in device of numpy arrays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptkit.layout import ParallelLayout
from ckptkit.loading.restore import restore
from tests.ckptkit.model_tables import gpt_tensors, values
from tests.ckptkit.saves import assert_restored, pieces_of, save_whole

BOUNCE_BYTES = 1 << 20
TENSORS = gpt_tensors(hidden=256, ffn=512, vocab=2001)


class Device:
    """Counts copies, and makes them as late as it may."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        self._started: list[tuple[np.ndarray, np.ndarray]] = []

    def start(self, memory: np.ndarray, copies: Sequence[tuple[np.ndarray, int, int]], *, to_device: bool) -> None:
        assert to_device
        assert len(memory) == BOUNCE_BYTES
        self._started += [(data, memory[at : at + size]) for data, at, size in copies]
        self.copies += [size for *_, size in copies]

    def wait(self) -> None:
        for data, held in self._started:
            assert data.nbytes == held.nbytes
            data.view(np.uint8)[:] = held
        self._started = []

    def unlock(self) -> None:
        assert not self._started


@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2"])
def test_a_device_is_filled_like_host_memory(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("ckptkit.loading.targets.BOUNCE_BYTES", BOUNCE_BYTES)
    monkeypatch.setattr("ckptkit.loading.targets.host_address", lambda data: None)
    monkeypatch.setattr("ckptkit.loading.targets.Transfer", lambda: device)
    assert save_whole(tmp_path, 1, TENSORS).ok
    parsed = ParallelLayout.parse(layout)
    rank = parsed.world_size - 1
    pieces = pieces_of(TENSORS, parsed, rank)
    restore(str(tmp_path), 1, pieces, tensors=TENSORS)
    assert_restored(pieces, pieces_of(TENSORS, parsed, rank, values(TENSORS)))
    needed = sum(piece.data.nbytes for piece in pieces)
    assert sum(device.copies) == needed > BOUNCE_BYTES
    # also where rows of columns are gathered a tensor goes over in one copy, or two at a buffer's end
    assert len(device.copies) <= len(pieces) + 2 * -(-needed // BOUNCE_BYTES)
