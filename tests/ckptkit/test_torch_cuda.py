"""CUDA tensors through the page-locked arena, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit.loading.restore import restore
from ckptkit.loading.targets import BOUNCE_BYTES
from ckptkit.saving.checkpointer import Checkpointer
from tests.ckptkit.model_tables import gpt_tensors, values
from tests.ckptkit.saves import NUM_LAYERS, ONE, pieces_of

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_state_on_a_device_is_saved_and_restored(tmp_path: Path, dtype: str, torch_dtype: "torch.dtype") -> None:
    tensors = gpt_tensors(hidden=512, ffn=2048, vocab=30_000, dtype=dtype)
    assert sum(info.size_bytes for info in tensors) > 2 * BOUNCE_BYTES

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
