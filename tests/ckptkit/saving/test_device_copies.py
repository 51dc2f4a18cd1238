"""State on a device takes the copies of a Transfer: here one that copies from the host, and only when it is waited for.

The real one is tested in test_torch_cuda.py, where there is a GPU.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.handoff.block_layout import BLOCK_BYTES
from ckptkit.io.torch_tensors import Bytes, host_addresses
from ckptkit.model.tensor import Piece
from ckptkit.saving import save as save_module
from ckptkit.saving import staging as staging_module
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.saving.save import save
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, ONE, assert_holds, pieces_of

torch = pytest.importorskip("torch")
TENSORS = gpt_tensors(hidden=128, ffn=1024, vocab=7000)


class LateTransfer:
    """Copies at the last moment, as a device might."""

    def __init__(self) -> None:
        self._copies: list[tuple[Bytes, Any, int, int]] = []
        self.num_copies = self.num_followed = 0

    def follow(self, tensors: Sequence[Any]) -> None:
        self.num_followed = len(tensors)

    def start(self, memory: Bytes, copies: Sequence[tuple[Any, int, int]], *, follows: bool = False) -> None:
        self._copies += [(memory, *copy) for copy in copies]

    def wait(self) -> None:
        for memory, tensor, offset, size in self._copies:
            assert tensor.dtype == torch.uint8
            memory[offset : offset + size] = tensor.numpy()
        self.num_copies += len(self._copies)
        self._copies.clear()

    def unlock(self) -> None:
        assert not self._copies, "memory that is still written to"


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Piece]:
    """Torch tensors, all of them or two of three on the device."""
    pieces_made = pieces_of(TENSORS, ONE, 0, values(TENSORS), lambda flat: torch.from_numpy(flat.copy()))
    on_device = {id(p.data) for number, p in enumerate(pieces_made) if request.param == "all" or number % 3}

    def addresses(sources: Sequence[Any]) -> np.ndarray:
        return host_addresses(sources) * np.array([id(data) not in on_device for data in sources])

    monkeypatch.setattr(staging_module, "host_addresses", addresses)
    for module in (staging_module, save_module):
        monkeypatch.setattr(module, "Transfer", LateTransfer)
    return pieces_made


@pytest.mark.ci
@pytest.mark.parametrize(
    ("pieces", "overlap", "window_bytes"),
    [
        ("some", True, 2 * BLOCK_BYTES),
        pytest.param("all", True, 0, marks=pytest.mark.slow),
        pytest.param("some", False, 0, marks=pytest.mark.slow),
        pytest.param("all", False, 2 * BLOCK_BYTES, marks=pytest.mark.slow),
    ],
    indirect=["pieces"],
)
def test_a_checkpointer_saves_them(tmp_path: Path, pieces: list[Piece], overlap: bool, window_bytes: int) -> None:
    options = CheckpointerOptions(window_bytes=window_bytes)
    common = {"tensors": TENSORS, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {"scale": 1}}
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, pieces, **common, overlap=overlap)
        checkpointer.join()
        for piece in pieces:
            piece.data.fill_(-1)
        assert all(report.ok for report in checkpointer.wait())
        transfer = checkpointer._arena.transfer
        assert transfer.num_copies >= 2 * transfer.num_followed > 0
    for step in (1, 2):
        assert_holds(tmp_path, step, TENSORS)


@pytest.mark.parametrize("pieces", ["all", "some"], indirect=True)
def test_one_call_saves_them(tmp_path: Path, pieces: list[Piece]) -> None:
    common = {"tensors": TENSORS, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {"scale": 1}}
    save(str(tmp_path), 1, pieces, **common, block_bytes=4 << 20)
    assert_holds(tmp_path, 1, TENSORS)
