"""HostBatch: its arrays in memory that is there, and the memory that it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import BatchOptions, Blend, HostBatch, Segment, write_store
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


def test_a_smaller_buffer_holds_tokens_alone() -> None:
    assert HostBatch.num_bytes((2, 3, 4), tokens_only=True) == 2 * 3 * 5 * 8 == 240
    buffer = np.arange(30).view(np.uint8)
    with pytest.raises(UserError, match=r"uint8\[240\], uint8\[672\] expected"):
        HostBatch.over(buffer, (2, 3, 4))
    batch = HostBatch.over(buffer, (2, 3, 4), tokens_only=True)
    assert batch.is_tokens_only
    assert not HostBatch.over(np.empty(NUM_BYTES, np.uint8), (2, 3, 4), tokens_only=True).is_tokens_only
    assert batch.tokens[1, 2].tolist() == [25, 26, 27, 28]
    assert batch.labels[1, 2].tolist() == [26, 27, 28, 29]
    assert (batch.positions == np.tile(np.arange(4), (2, 3, 1))).all()
    assert (batch.loss_mask == np.ones((2, 3, 4))).all()
    assert (batch.positions.dtype, batch.loss_mask.dtype) == (np.int64, np.float32)
    for constant in (batch.positions, batch.loss_mask):
        with pytest.raises(ValueError, match="read-only"):
            constant[0] = 0


def test_what_differs_between_rows_is_written(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [range(40)] * 4, vocab_size=99, eod_id=39)
    plain = Blend([(store, 1.0)], seq_length=4)
    masked = Blend([(store, 1.0)], seq_length=4, later=[Segment(9, masked=((0, 1),))])
    for blend, options in (
        (plain, BatchOptions(mask_eod_loss=True)), (plain, BatchOptions(reset_positions=True)),
        (masked, BatchOptions()),
    ):  # fmt: skip
        assert blend.num_bytes((2, 4), options) == 2 * 4 * 28
        assert not blend.batch([0, 1], options).is_tokens_only
        small = np.empty(HostBatch.num_bytes((2, 4), tokens_only=True), np.uint8)
        with pytest.raises(UserError, match=r"uint8\[80\], uint8\[224\] expected"):
            blend.batch([0, 1], options, out=small)
    assert plain.num_bytes((2, 4)) == 2 * 5 * 8
    assert plain.batch([0, 1], out=small).buffer is small
    large = plain.batch([0, 1], out=np.empty(224, np.uint8))
    for name in ("tokens", "labels", "positions", "loss_mask"):
        assert (getattr(large, name) == getattr(plain.batch([0, 1]), name)).all()
        assert np.shares_memory(getattr(large, name), large.buffer)


def test_a_blend_fills_the_callers_memory(tmp_path: Path) -> None:
    blend = Blend([(write_store(tmp_path / "a", [range(40)] * 4, vocab_size=99), 1.0)], seq_length=4)
    buffer = np.full(HostBatch.num_bytes((3, 4)), 0xAA, np.uint8)
    options = BatchOptions(mask_eod_loss=True, reset_positions=True)
    batch = blend.batch([7, 5, 6], options, out=buffer)
    assert batch.buffer is buffer
    assert (buffer == blend.batch([7, 5, 6], options).buffer).all()
    with pytest.raises(UserError, match=r"uint8\[336\], uint8\[224\] expected"):
        blend.batch([7, 5], out=buffer)
