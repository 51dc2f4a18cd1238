"""CUDA tensors through the page-locked arena, bit for bit."""

import dataclasses
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckptkit.handoff.block_layout import BLOCK_BYTES
from ckptkit.loading.node_exchange import NodeExchange
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore, restore_from
from ckptkit.model.layout import ParallelLayout
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.saving.save import save
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, ONE, assert_holds, pieces_of, save_whole
from threefold.storage import open_storage

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_state_on_a_device_is_saved_and_restored(
    tmp_path: Path, dtype: str, torch_dtype: "torch.dtype", monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gpt_tensors(hidden=512, ffn=2048, vocab=30_000, dtype=dtype)
    block_bytes = 1 << 20
    monkeypatch.setattr("ckptkit.loading.targets.BLOCK_BYTES", block_bytes)
    assert sum(info.size_bytes for info in tensors) > 100 * block_bytes, "all buffers are filled again and again"

    def on_device(flat: np.ndarray) -> "torch.Tensor":
        signed = flat.view(np.int16) if flat.dtype == np.uint16 else flat
        return torch.from_numpy(signed.copy()).view(torch_dtype).cuda()

    numbers = iter(range(10_000))

    def anywhere(flat: np.ndarray) -> "torch.Tensor":
        return on_device(flat) if next(numbers) % 3 else on_device(flat).cpu()

    saved = pieces_of(tensors, ONE, 0, values(tensors), anywhere)
    expected = [piece.data.clone() for piece in saved]
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        for step in (1, 2):
            for piece in saved:
                piece.data.view(torch.uint8).add_(0)  # work on the current stream that the save must wait for
            checkpointer.save(step, saved, tensors=tensors, layout=ONE, num_layers=NUM_LAYERS, metadata={})
        for piece in saved:
            piece.data.zero_()
        assert all(report.ok for report in checkpointer.wait())
    for step in (1, 2):
        restored = pieces_of(tensors, ONE, 0, None, anywhere)
        restore(str(tmp_path), step, restored, tensors=tensors)
        for piece, want in zip(restored, expected, strict=True):  # as bytes: some patterns are NaN
            assert torch.equal(piece.data.view(torch.uint8).cpu(), want.view(torch.uint8).cpu()), piece.name


@pytest.mark.parametrize("window_bytes", [0, 3 * BLOCK_BYTES])
def test_overlapped_copies_hold_what_was_there_when_the_save_was_called(tmp_path: Path, window_bytes: int) -> None:
    tensors = gpt_tensors(hidden=512, ffn=2048, vocab=30_000)
    common = {"tensors": tensors, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {"scale": 1}, "overlap": True}
    device = torch.device("cuda")
    pieces = [
        dataclasses.replace(piece, data=torch.from_numpy(piece.data).to(device))
        for piece in pieces_of(tensors, ONE, 0, values(tensors))
    ]
    options = CheckpointerOptions(window_bytes=window_bytes)
    busy = torch.rand(4096, 4096, device=device)
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        for step in (1, 2, 3):
            for piece in pieces:  # the values come from work that is not done when the save is called
                piece.data.mul_(0)
            for _ in range(50):
                busy = busy @ busy / 4096
            for piece in pieces_of(tensors, ONE, 0, values(tensors)):
                at = next(p for p in pieces if (p.name, p.start) == (piece.name, piece.start))
                at.data.copy_(torch.from_numpy(piece.data).pin_memory(), non_blocking=True)
            checkpointer.save(step, pieces, **common)
            if step == 3:  # dropped, and their memory taken by others at once
                shapes = [piece.data.shape for piece in pieces]
                pieces.clear()
                [torch.full(shape, 7.0, device=device) for shape in shapes]
            else:
                checkpointer.join()
                for piece in pieces:
                    piece.data.fill_(-1)
        assert all(report.ok for report in checkpointer.wait())
    for step in (1, 2, 3):
        assert_holds(tmp_path, step, tensors)


@pytest.mark.parametrize("everywhere", [True, False])
def test_one_call_saves_state_on_a_device(tmp_path: Path, everywhere: bool) -> None:
    tensors = gpt_tensors(hidden=512, ffn=2048, vocab=30_000)
    places = [torch.device("cuda"), torch.device("cuda" if everywhere else "cpu")]
    saved = [
        dataclasses.replace(piece, data=torch.from_numpy(piece.data).to(places[number % 2]))
        for number, piece in enumerate(pieces_of(tensors, ONE, 0, values(tensors)))
    ]
    save(str(tmp_path), 1, saved, tensors=tensors, layout=ONE, num_layers=NUM_LAYERS, metadata={"scale": 1})
    assert_holds(tmp_path, 1, tensors)


def test_ranks_of_a_node_fill_devices_together(tmp_path: Path) -> None:
    tensors = gpt_tensors(hidden=512, ffn=2048, vocab=30_000)
    assert save_whole(tmp_path, 1, tensors).ok
    job = uuid.uuid4().hex

    def restored(rank: int) -> int:
        layout, place = (ParallelLayout(tp=2), 1) if rank == 2 else (ONE, 0)
        pieces = pieces_of(tensors, layout, place, None, lambda flat: torch.from_numpy(flat.copy()).cuda())
        with (
            NodeExchange(rank, 3, job) as exchange,
            CheckpointReader(open_storage(tmp_path), 1, exchange=exchange) as reader,
        ):
            restore_from(reader, pieces, tensors=tensors)
            for piece, want in zip(pieces, pieces_of(tensors, layout, place, values(tensors)), strict=True):
                assert piece.data.cpu().numpy().tobytes() == want.data.tobytes(), piece.name
            return reader.bytes_read

    with ThreadPoolExecutor(3) as pool:
        read = sum(pool.map(restored, range(3)))
    assert read <= 1.05 * sum(info.size_bytes for info in tensors)
