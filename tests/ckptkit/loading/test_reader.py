"""The reader gives the same bytes from any storage, reads ascending granules once, and hands out nothing unverified."""

import re
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.check.verify import verify_checkpoint
from ckptkit.format.keys import ROOT_KEY
from ckptkit.io.blocks import GRANULE_BYTES, BlockReader, DamagedGranule, checksums, num_granules
from ckptkit.io.remote_reader import RemoteReader
from ckptkit.loading.chunk_source import reading_threads
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.checkpoints import cut, write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, rank_chunks, values
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.local import LocalStorage

RANDOM = np.random.default_rng(1).integers(0, 256, 40 << 20, dtype=np.uint8)
LAYERS = 3


class FarStorage(LocalStorage):
    """A storage that gives no local paths, as object stores do."""

    def local_path(self, key: str) -> None:  # type: ignore[override]
        return None


@settings(max_examples=25)
@given(data=st.data())
def test_remote_and_local_readers_agree(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "far"
    size = data.draw(st.sampled_from([1, 5000, GRANULE_BYTES, 3 * GRANULE_BYTES + 77, 37 * GRANULE_BYTES + 5]))
    content = RANDOM[:size]
    storage = FarStorage(folder)
    storage.write("f", content.tobytes())
    expected = checksums(content)
    near, far = BlockReader(folder / "f", size, expected), RemoteReader(storage, "f", size, expected)
    ascending, reach, touched = data.draw(st.booleans()), 0, set()
    for _ in range(3):
        low = reach if ascending else 0
        starts = sorted(data.draw(st.lists(st.integers(low, size), max_size=8)))
        lengths = [data.draw(st.integers(0, size - start)) for start in starts]
        for reader in (near, far):
            targets = [np.zeros(length, np.uint8) for length in lengths]
            reader.read([(a, n, t.ctypes.data) for a, n, t in zip(starts, lengths, targets, strict=True)])
            for start, length, target in zip(starts, lengths, targets, strict=True):
                assert np.array_equal(target, content[start : start + length])
        for start, length in zip(starts, lengths, strict=True):
            reach = max(reach, start + length)
            touched.update(range(start // GRANULE_BYTES, num_granules(start + length)) if length else ())
    if ascending:  # each granule is read once
        needed = sum(min(GRANULE_BYTES, size - granule * GRANULE_BYTES) for granule in touched)
        assert near.bytes_read == far.bytes_read == needed
    near.close()


def addresses_of(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def make_checkpoint(storage: Storage) -> dict[str, np.ndarray]:
    tensors = gpt_tensors(LAYERS, hidden=128, vocab=2001)
    arrays = values(tensors)
    write_checkpoint(storage, 9, ParallelLayout(tp=2, dp=2), LAYERS, tensors, arrays)
    return arrays


@pytest.mark.parametrize("kind", ["local", "far", "memory", "s3"])
def test_any_chunks_from_any_storage(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "far":
        storage: Storage = FarStorage(tmp_path)
    else:
        url = {"local": str(tmp_path), "memory": f"memory://{tmp_path.name}"}.get(kind)
        storage = open_storage(url or request.getfixturevalue("s3_url"))
    arrays = make_checkpoint(storage)
    layout = ParallelLayout(tp=4, pp=2)
    with CheckpointReader(storage, 9) as reader:
        for rank in range(layout.world_size):
            wanted = rank_chunks(list(reader.root.tensors.values()), LAYERS, layout, layout.coords(rank))
            targets = [np.zeros(stop - start, np.float32) for _, _, start, stop in wanted]
            reader.read(ChunkTable.of(wanted), addresses_of(targets))
            for (info, box, start, stop), target in zip(wanted, targets, strict=True):
                assert np.array_equal(target, cut(arrays[info.name], box, start, stop))


@pytest.mark.parametrize("kind", [LocalStorage, FarStorage])
def test_damage_names_file_offset_and_tensor(tmp_path: Path, kind: type[LocalStorage]) -> None:
    make_checkpoint(LocalStorage(tmp_path))
    with CheckpointReader(kind(tmp_path), 9) as reader:
        part, index = reader.root.parts[1], reader.files.read_index(reader.root.parts[1])
        path = tmp_path / reader.files.folder / part.data
        content = bytearray(path.read_bytes())
        at = int(index.offsets[3]) + 1
        content[at] ^= 0x10
        path.write_bytes(content)
        name = index.chunks.names[index.chunks.tensor[3]]
        info = reader.root.tensors[name]
        wanted = ChunkTable.of([(info, index.chunks.box(3), int(index.chunks.start[3]), int(index.chunks.stop[3]))])
        target = np.zeros(int(wanted.size_bytes[0]), np.uint8)
        with pytest.raises(DamagedGranule) as caught:
            reader.read(wanted, addresses_of([target]))
        assert caught.value.granule == at // GRANULE_BYTES
        assert name in caught.value.tensors
        assert part.data in str(caught.value)
        assert name in str(caught.value) or "..." in str(caught.value)
        assert not target.any()


def test_a_missing_data_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    make_checkpoint(LocalStorage(tmp_path))
    for kind in (LocalStorage, FarStorage):
        with CheckpointReader(kind(tmp_path), 9) as reader:
            (tmp_path / reader.files.folder / reader.root.parts[0].data).unlink(missing_ok=True)
            info = reader.root.tensors["embed.weight"]
            chunk = rank_chunks([info], LAYERS, ParallelLayout(), ParallelLayout().coords(0))
            target = np.zeros(info.numel, np.float32)
            with pytest.raises(CheckFailed, match=r"part-00000.safetensors is missing"):
                reader.read(ChunkTable.of(chunk), addresses_of([target]))


def test_a_damaged_index_is_found_before_any_data_is_read(tmp_path: Path) -> None:
    make_checkpoint(LocalStorage(tmp_path))
    with CheckpointReader(LocalStorage(tmp_path), 9) as reader:
        path = tmp_path / reader.files.folder / reader.root.parts[2].index
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckFailed, match=r"part-00002.index is damaged"):
            _ = reader.stored


def test_parts_that_do_not_make_up_the_tensors_are_told_with_their_place(tmp_path: Path) -> None:
    make_checkpoint(LocalStorage(tmp_path))
    storage = open_storage(tmp_path)
    root = CheckpointReader(storage, 9).root
    info = root.tensors["embed.weight"]
    chunk = rank_chunks([info], LAYERS, ParallelLayout(), ParallelLayout().coords(0))
    target = np.zeros(info.numel, np.float32)
    other = dict(root.tensors) | {"norm.weight": replace(root.tensors["norm.weight"], dtype="F64")}
    for wrong, message, file in (
        (replace(root, parts=root.parts[1:]), " is not whole: the checkpoint does not hold", ROOT_KEY),
        (replace(root, tensors=other), f"/{root.parts[2].index} holds norm.weight (F32, 1 dims)", root.parts[2].index),
    ):
        with CheckpointReader(storage, 9, root=wrong) as reader:
            with pytest.raises(CheckFailed, match=re.escape(f"{reader.url}{message}")):
                reader.read(ChunkTable.of(chunk), addresses_of([target]))
            with pytest.raises(CheckFailed, match=re.escape(f"{reader.url}{message}")):
                reader.plan(ChunkTable.of(chunk))
            assert verify_checkpoint(reader, share=0).faults[0].file == file
    assert not target.any()


def test_a_step_that_is_not_committed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no committed step 5"):
        CheckpointReader(open_storage(tmp_path), 5)


def test_the_root_of_another_step_is_refused(tmp_path: Path) -> None:
    make_checkpoint(LocalStorage(tmp_path))
    (tmp_path / "step-000000010").mkdir()
    (tmp_path / "step-000000010/root.json").write_bytes((tmp_path / "step-000000009/root.json").read_bytes())
    with pytest.raises(CheckFailed, match="is the root of step 9"):
        CheckpointReader(open_storage(tmp_path), 10)


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    arrays = make_checkpoint(LocalStorage(tmp_path))
    with CheckpointReader(open_storage(tmp_path), 9) as reader:
        reader.max_open_files = 2
        wanted = rank_chunks(list(reader.root.tensors.values()), LAYERS, ParallelLayout(), ParallelLayout().coords(0))
        targets = [np.zeros(info.numel, np.float32) for info, *_ in wanted]
        reader.read(ChunkTable.of(wanted), addresses_of(targets))
        for (info, *_), target in zip(wanted, targets, strict=True):
            assert np.array_equal(target, arrays[info.name].reshape(-1))
        assert reader.bytes_read <= sum(part.data_bytes for part in reader.root.parts)


def test_ctrl_c_does_not_wait_for_what_other_threads_would_still_read(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS)
    write_checkpoint(open_storage(tmp_path), 1, ParallelLayout(), LAYERS, tensors, values(tensors))
    begun = Event()

    def read_on(reader: CheckpointReader) -> None:
        source, memory = reader.files.open_part(0, None), np.empty(64, np.uint8)
        with closing(source):
            for _ in range(20_000):
                reader.files.read_part(0, source, [(0, 64, memory.ctypes.data)])
                begun.set()

    with CheckpointReader(open_storage(tmp_path), 1) as reader:
        with suppress(KeyboardInterrupt), reading_threads(1, reader) as pool:
            reading = pool.submit(read_on, reader)
            begun.wait(60)
            raise KeyboardInterrupt
        assert isinstance(reading.exception(), StorageError)
        assert verify_checkpoint(reader).ok
