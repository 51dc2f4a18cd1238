"""HostBatch: its arrays in memory that is there, and the memory that it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import BatchOptions, Blend, HostBatch, write_store
from threefold.errors import UserError

NUM_BYTES = 2 * 3 * 4 * 28


def test_the_arrays_follow_each_other_in_the_buffer() -> None:
    assert HostBatch.num_bytes((2, 3, 4)) == NUM_BYTES == 672
    buffer = np.zeros(NUM_BYTES, np.uint8)
    batch = HostBatch.over(buffer, (2, 3, 4))
    batch.tokens[:], batch.labels[:], batch.positions[:], batch.loss_mask[:] = 1, 2, 3, 4
    assert (buffer[:576].view(np.int64) == np.repeat([1, 2, 3], 24)).all()
    assert (buffer[576:].view(np.float32) == 4).all()
    assert batch.tokens.shape == batch.loss_mask.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (bytearray(NUM_BYTES), "is a bytearray, not a numpy array"),
        (np.empty(NUM_BYTES - 1, np.uint8), r"is uint8\[671\], uint8\[672\] expected"),
        (np.empty(NUM_BYTES + 1, np.uint8), r"is uint8\[673\], uint8\[672\] expected"),
        (np.empty(NUM_BYTES, np.int8), r"is int8\[672\], uint8\[672\] expected"),
        (np.empty(NUM_BYTES // 8, np.int64), r"is int64\[84\], uint8\[672\] expected"),
        (np.empty((2, NUM_BYTES // 2), np.uint8), r"is uint8\[2, 336\], uint8\[672\] expected"),
        (np.empty(2 * NUM_BYTES, np.uint8)[::2], "has gaps"),
        (np.frombuffer(bytes(NUM_BYTES), np.uint8), "is read-only"),
        (np.empty(NUM_BYTES + 8, np.uint8)[1:-7], "not aligned to 8 bytes"),
    ],
)
def test_memory_that_does_not_fit(memory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        HostBatch.over(memory, (2, 3, 4))
    assert raised.value.hint == "np.empty(672, np.uint8), or torch.empty(672, dtype=torch.uint8).numpy()"


def test_a_blend_fills_the_callers_memory(tmp_path: Path) -> None:
    blend = Blend([(write_store(tmp_path / "a", [range(40)] * 4, vocab_size=99), 1.0)], seq_length=4)
    buffer = np.full(HostBatch.num_bytes((3, 4)), 0xAA, np.uint8)
    options = BatchOptions(mask_eod_loss=True, reset_positions=True)
    batch = blend.batch([7, 5, 6], options, out=buffer)
    assert batch.buffer is buffer
    assert (buffer == blend.batch([7, 5, 6], options).buffer).all()
    with pytest.raises(UserError, match=r"uint8\[336\], uint8\[224\] expected"):
        blend.batch([7, 5], out=buffer)
