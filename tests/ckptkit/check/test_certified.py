"""Certificates of steps: the same for every layout, kept by reshard, and compared wherever a step is read whole."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.verify import NOT_AS_SAVED, Verification, verify_checkpoint
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import checksums, xxh3_64
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.certificate import KIND, TensorSums, digest
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.saving.save import save
from tests.ckptkit.io.test_sums import crc
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, pieces_of
from threefold.errors import CheckFailed
from threefold.storage import Storage, open_storage

TENSORS = gpt_tensors(NUM_LAYERS)
ARRAYS = values(TENSORS)
layouts = st.builds(
    ParallelLayout, st.sampled_from([1, 2, 4]), st.just(1), st.just(1), st.integers(1, 3), st.integers(1, 2)
)


def expected() -> dict[str, object]:
    """The certificate as the format's page says it."""
    stored = [info for info in TENSORS if info.placement.tied_to is None]
    return {"sums": KIND, "tensors": {info.name: digest(info, crc(ARRAYS[info.name].tobytes())) for info in stored}}


EXPECTED = expected()


def saved(url: Path, layout: ParallelLayout, arrays: dict[str, np.ndarray] = ARRAYS) -> Storage:
    """A run with step 3, saved by the ranks of a layout one after the other."""
    for rank in reversed(range(layout.world_size)):
        pieces = pieces_of(TENSORS, layout, rank, arrays)
        save(
            str(url), 3, pieces, tensors=TENSORS, layout=layout, num_layers=NUM_LAYERS, metadata={}, rank=rank,
            world_size=layout.world_size, attempt="a", awaits_commit=False,
        )  # fmt: skip
    return open_storage(url)


def verified(storage: Storage, share: float = 1.0) -> Verification:
    with CheckpointReader(storage, 3) as reader:
        return verify_checkpoint(reader, share=share)


def forge(storage: Storage, *, with_sums: bool) -> None:
    """Change the last byte of the first data file, under right checksums; and its sums, if asked to."""
    root, folder = read_root(storage, 3), step_folder(3)
    part = root.parts[0]
    with CheckpointReader(storage, 3) as reader:
        index = reader.read_index(part)
    data = bytearray(storage.read(f"{folder}/{part.data}"))
    data[-1] ^= 1
    sums = index.sums
    if with_sums:
        made = ChunkSums(index.chunks, index.data_offset)
        made.add(bytes(data), 0)
        sums = made.values
    text = replace(index, checksums=checksums(bytes(data)), sums=sums).to_bytes()
    storage.write(f"{folder}/{part.data}", bytes(data))
    storage.write(f"{folder}/{part.index}", text)
    parts = (Part(part.data, len(data), part.index, len(text), xxh3_64(text)), *root.parts[1:])
    storage.write(f"{folder}/{ROOT_KEY}", replace(root, parts=parts).to_bytes())


def root_of(storage: Storage) -> Root:
    return read_root(storage, 3)


@given(layout=layouts)
def test_the_ranks_of_every_layout_add_up_to_the_same_certificate(layout: ParallelLayout) -> None:
    total, numbers = TensorSums(TENSORS), {info.name: number for number, info in enumerate(TENSORS)}
    for rank in range(layout.world_size):
        pieces = pieces_of(TENSORS, layout, rank, ARRAYS)
        chunks = ChunkTable.of_pieces(pieces, TENSORS)
        sums, at = ChunkSums(chunks, 0), 0
        for piece in pieces:
            sums.add(piece.data, at)
            at += piece.data.nbytes
        total.add(np.array([numbers[name] for name in chunks.names], np.int64), sums.values)
    assert total.certificate() == EXPECTED


@pytest.mark.parametrize(
    ("layout", "other"),
    [("tp2-dp2", "tp4"), pytest.param("dp3-pp2", "tp2-pp3-dp2", marks=pytest.mark.slow)],
)
def test_what_is_saved_and_resharded_has_the_same_certificate(tmp_path: Path, layout: str, other: str) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout.parse(layout)), open_storage(tmp_path / "other")
    assert root_of(storage).certificate == EXPECTED
    with CheckpointReader(storage, 3) as reader:
        assert reshard(reader, target, ParallelLayout.parse(other)).certified
    assert root_of(target).certificate == EXPECTED
    assert verified(target).num_certified == len(EXPECTED["tensors"])  # type: ignore[arg-type]


def test_verify_says_how_many_tensors_are_equal_to_what_was_saved(tmp_path: Path) -> None:
    storage = saved(tmp_path, ParallelLayout(tp=2, dp=2))
    whole = verified(storage)
    assert whole.ok
    assert whole.num_certified == len(EXPECTED["tensors"])  # type: ignore[arg-type]
    assert [verified(storage, share).num_certified for share in (0.0, 0.5)] == [0, 0]


def test_values_that_have_other_sums_than_their_index_are_found(tmp_path: Path) -> None:
    storage = saved(tmp_path, ParallelLayout(tp=2))
    forge(storage, with_sums=False)
    [fault] = verified(storage).faults
    assert fault.what == NOT_AS_SAVED
    assert fault.file == root_of(storage).parts[0].data


def test_values_that_are_not_those_of_the_certificate_are_found_and_not_resharded(tmp_path: Path) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout(tp=2)), open_storage(tmp_path / "other")
    forge(storage, with_sums=True)
    for share in (0.0, 1.0):
        [fault] = verified(storage, share).faults
        assert (fault.what, fault.file) == (NOT_AS_SAVED, ROOT_KEY)
    with CheckpointReader(storage, 3) as reader, pytest.raises(CheckFailed, match="is not equal to what was saved"):
        reshard(reader, target, ParallelLayout())
    assert not list(target.list_keys("step-000000003/"))


def test_what_has_no_certificate_gets_one_by_a_reshard(tmp_path: Path) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout(tp=2)), open_storage(tmp_path / "other")
    storage.write(f"{step_folder(3)}/{ROOT_KEY}", replace(root_of(storage), certificate=None).to_bytes())
    assert verified(storage).num_certified == 0
    for _ in range(2):  # the same call finds what it made
        with CheckpointReader(storage, 3) as reader:
            assert not reshard(reader, target, ParallelLayout(tp=4)).certified
    assert root_of(target).certificate == EXPECTED


def test_a_copy_keeps_the_certificate(tmp_path: Path) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout(dp=2)), open_storage(tmp_path / "other")
    with CheckpointReader(storage, 3) as reader:
        copy_step(reader, target)
    assert root_of(target).certificate == EXPECTED


def test_an_element_a_name_or_a_dtype_makes_another_certificate(tmp_path: Path) -> None:
    name = TENSORS[0].name
    changed = ARRAYS[name].copy()
    changed.reshape(-1)[:2] = changed.reshape(-1)[1::-1]
    storage = saved(tmp_path, ParallelLayout(tp=2), ARRAYS | {name: changed})
    found = root_of(storage).certificate
    assert found is not None
    same = {key for key, value in EXPECTED["tensors"].items() if found["tensors"][key] == value}  # type: ignore[attr-defined]
    assert same == set(EXPECTED["tensors"]) - {name}  # type: ignore[call-overload]
