"""Batches of packed rows that end with their longest row: nothing but padding is left out, whoever makes them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from datakit import BatchOptions, Blend, HostBatch, Loader, RunStream, Segment, pack
from datakit.torch import MapDataset, StreamDataset
from tests.datakit.rows.test_packed_stream import make_packed
from tests.datakit.support.data_loaders import first_batches
from threefold.errors import UserError

LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any)
COLUMNS = ("tokens", "labels", "positions", "loss_mask")


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    seq_length=st.integers(1, 14),
    packing=st.sampled_from(["best_fit", "pad"]),
    multiple=st.integers(1, 16),
    num_rows=st.integers(1, 5),
    in_memory=st.booleans(),
)
def test_every_token_and_loss_is_kept_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    packing: str,
    multiple: int,
    num_rows: int,
    in_memory: bool,
) -> None:
    store = make_packed(tmp_path_factory.mktemp("stores") / "s", lengths, seq_length, packing)
    blend = Blend([(store, 1.0)], seq_length=seq_length, seed=3, later=[Segment(9, masked=((0, 0),))])
    options = BatchOptions(mask_eod_loss=True, pad_to_multiple_of=multiple)
    for first in range(0, 4 * num_rows, num_rows):
        samples = np.arange(first, first + num_rows)
        whole = blend.batch(samples, BatchOptions(mask_eod_loss=True))
        out = np.full(blend.num_bytes((num_rows, seq_length), options), 0xAA, np.uint8) if in_memory else None
        cut = blend.batch(samples, options, out=out)
        held = [
            sum(piece.size for piece in store.rows.pieces(row, seq_length))
            for row in (blend.addresses(samples)[1] // seq_length)
        ]
        width = min(-(-max(held) // multiple) * multiple, seq_length)
        assert cut.shape == (num_rows, width)
        assert len(cut.buffer) == HostBatch.num_bytes(cut.shape)
        for name in COLUMNS:
            assert (getattr(cut, name) == getattr(whole, name)[:, :width]).all()
        assert not whole.loss_mask[:, width:].any()
        assert np.array_equal(cut.cu_seqlens, np.append(np.flatnonzero(cut.positions == 0), num_rows * width))
        assert cut.documents()[1] == np.diff(cut.cu_seqlens).max()


@pytest.fixture
def blend(tmp_path: Path) -> Blend:
    """Padded rows of 16 tokens, of 24 from sample 24 on."""
    store = make_packed(tmp_path / "s", [3, 9, 5, 12, 1, 16, 7, 2] * 9, 16, "pad")
    pack(store.path, seq_length=24, packing="pad")
    return Blend([(store, 1.0)], seq_length=16, seed=1, later=[Segment(24, seq_length=24)])


def test_a_steps_rows_are_cut_on_each_rank_and_so_is_each_micro_batch(blend: Blend) -> None:
    options, lost = BatchOptions(pad_to_multiple_of=4), 0
    for rank in range(2):
        items = iter(StreamDataset(blend, 2, rank, 2, options=options))
        with Loader(blend, 2, 2, rank, 2) as loader, Loader(blend, 2, 2, rank, 2, options=options) as cut:
            out = np.empty(cut.num_bytes, np.uint8)
            for number in range(6):
                if number == 3:  # rows of 24 tokens take more memory
                    out = np.empty(cut.num_bytes, np.uint8)
                whole, step = loader.next_step(), cut.next_step(out)
                parts = [next(items) for _ in range(2)]
                width = step.shape[-1]
                assert width % 4 == 0
                assert width == max(part["tokens"].shape[1] for part in parts)
                lost += whole.shape[-1] - width
                assert whole.loss_mask.sum() == step.loss_mask.sum() == sum(part["loss_mask"].sum() for part in parts)
                for place, part in enumerate(parts):
                    for name in COLUMNS:
                        found = part[name].numpy()
                        assert (found == getattr(whole, name)[place, :, : found.shape[1]]).all()
                    assert part["tokens"].untyped_storage().nbytes() == HostBatch.num_bytes(part["tokens"].shape)
                    assert part["cu_seqlens"][-1] == part["tokens"].numel()
                    assert part["max_seqlen"] == part["cu_seqlens"].diff().max()
    assert lost > 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_send_rows_of_any_length(blend: Blend, num_workers: int) -> None:
    options = BatchOptions(pad_to_multiple_of=2)
    numbers = MapDataset(blend, 3, 16, options=options)
    stream = DataLoader(StreamDataset(blend, 3, options=options), batch_size=None, num_workers=num_workers)
    batches = first_batches(stream, 16)
    for batch, other in zip(batches, numbers, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in (*COLUMNS, "cu_seqlens"))
    assert len({batch["tokens"].shape[1] for batch in batches}) > 3


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pad_to_multiple_of -8"):
        BatchOptions(pad_to_multiple_of=-8)
    text = "[data]\nstores = ['s']\npad_to_multiple_of = {}\npacking = '{}'\n"
    for value, packing, fault in (
        (-1, "pad", "must be at least 0"),
        (8, "concat", r"pad_to_multiple_of needs data\.packing"),
    ):
        (tmp_path / "run.toml").write_text(text.format(value, packing))
        with pytest.raises(UserError, match=fault):
            RunStream.read(str(tmp_path / "run.toml"))
    (tmp_path / "run.toml").write_text(text.format(64, "pad"))
    assert RunStream.read(str(tmp_path / "run.toml")).data.batch_options.pad_to_multiple_of == 64
