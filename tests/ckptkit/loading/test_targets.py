"""Memory of devices is filled through bounded buffers, with few copies; a stand-in device of numpy arrays."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.io.torch_tensors import host_addresses
from ckptkit.loading.restore import restore
from ckptkit.loading.targets import Targets
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import assert_restored, pieces_of, save_whole

BLOCK_BYTES = 1 << 20
TENSORS = gpt_tensors(hidden=256, ffn=512, vocab=2001)


class Device:
    """Counts copies, and makes them as late as it may: where the buffer that they come from is waited for."""

    def __init__(self, copies: list[int]) -> None:
        self._copies = copies
        self._started: list[tuple[int, int, int]] = []

    def follow(self, tensors: Sequence[np.ndarray]) -> None:
        assert tensors

    def send(self, memory: np.ndarray, copies: Sequence[tuple[object, int, int, int]]) -> None:
        assert len(memory) == BLOCK_BYTES
        assert all(at + size <= BLOCK_BYTES for _, _, at, size in copies)
        self._started += [(address, memory.ctypes.data + at, size) for _, address, at, size in copies]
        self._copies += [size for *_, size in copies]

    def wait(self) -> None:
        for copy in self._started:
            ctypes.memmove(*copy)
        self._started = []

    def unlock(self) -> None:
        assert not self._started


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All memory seems to be that of a device; the sizes of the copies that are made to it."""
    made, module = list[int](), "ckptkit.loading.targets"
    monkeypatch.setattr(f"{module}.BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(f"{module}.is_on_host", lambda data: False)
    monkeypatch.setattr(f"{module}.device_addresses", host_addresses)
    monkeypatch.setattr(f"{module}.Transfer", lambda: Device(made))
    return made


@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2"])
def test_a_device_is_filled_like_host_memory(tmp_path: Path, layout: str, copies: list[int]) -> None:
    assert save_whole(tmp_path, 1, TENSORS).ok
    parsed = ParallelLayout.parse(layout)
    rank = parsed.world_size - 1
    pieces = pieces_of(TENSORS, parsed, rank)
    restore(str(tmp_path), 1, pieces, tensors=TENSORS)
    assert_restored(pieces, pieces_of(TENSORS, parsed, rank, values(TENSORS)))
    needed, stored = (sum(sizes) for sizes in ((p.data.nbytes for p in pieces), (i.size_bytes for i in TENSORS)))
    assert sum(copies) == needed > BLOCK_BYTES
    # also where rows of columns are gathered a tensor goes over in one copy, and one more at each border of a block
    assert len(copies) <= len(pieces) + 2 * -(-stored // BLOCK_BYTES)


@pytest.mark.usefixtures("copies")
def test_copies_that_begin_within_an_element_go_where_they_belong() -> None:
    """As those of ranks that share granules may, where a data section does not begin at a multiple of the itemsize."""
    target = np.zeros(4, np.float64)
    values = np.arange(32, dtype=np.uint8)
    begins = np.array([0, 13, 19], np.int64)
    zeros, sizes = np.zeros(3, np.int64), np.array([13, 6, 13], np.int64)

    def read(plan: LoadPlan, addresses: Any, num_threads: int | None = None) -> None:
        for source, size, address in zip(plan.source, plan.size, addresses, strict=True):
            memory = (ctypes.c_uint8 * int(size)).from_address(int(address))
            memory[:] = values[source : source + size].tolist()

    with Targets([target], 2) as targets:
        for row in (2, 0, 1):
            targets.fill(LoadPlan(zeros, begins, zeros, begins, sizes).take([row]), read)
    assert target.view(np.uint8).tolist() == values.tolist()
