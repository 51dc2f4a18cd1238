"""Verify finds every kind of damage, all of it, and names file, offset and tensor."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.hash import hash_checkpoint
from ckptkit.check.verify import Verification, check_data, sampled_granules, verify_checkpoint
from ckptkit.format.keys import ROOT_KEY
from ckptkit.format.root import Part, Root, Share
from ckptkit.io.blocks import GRANULE_BYTES, checksums, xxh3_64
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.step_files import StepFiles
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.cover import MAX_SEARCHED
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Buffer, ObjectInfo, open_storage
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.local import LocalStorage

LAYERS = 3
SMALL = gpt_tensors(1)


def make(folder: Path, **options: object) -> Root:
    tensors = gpt_tensors(LAYERS, hidden=128, vocab=2001)
    return write_checkpoint(
        open_storage(folder),
        9,
        ParallelLayout(tp=2, dp=2),
        LAYERS,
        tensors,
        values(tensors),
        **options,  # type: ignore[arg-type]
    )


def verify(folder: Path, **options: float) -> Verification:
    with CheckpointReader(open_storage(folder), 9) as reader:
        return verify_checkpoint(reader, **options)  # type: ignore[arg-type]


def flip(path: Path, at: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def test_a_sound_checkpoint_verifies(tmp_path: Path) -> None:
    root = make(tmp_path)
    result = verify(tmp_path)
    assert result.ok
    assert result.bytes_read == sum(part.data_bytes for part in root.parts)
    assert result.num_files == 4


@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_found(data: st.DataObject, tmp_path: Path) -> None:
    if not (tmp_path / "step-000000009").exists():
        make(tmp_path)
    path = data.draw(st.sampled_from(sorted(p for p in tmp_path.rglob("*") if p.is_file())))
    at, bits = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(1, 255))
    flip(path, at, bits)
    try:
        if path.name == ROOT_KEY:
            with pytest.raises(UserError, match=r"root.json"):
                verify(tmp_path)
            return
        faults = verify(tmp_path).faults
        assert len(faults) >= 1
        assert faults[0].file.endswith(path.name)
        if path.suffix == ".safetensors":
            assert faults[0].offset == at // GRANULE_BYTES * GRANULE_BYTES
            assert faults[0].tensors
    finally:
        flip(path, at, bits)


@given(st.integers(1, 5000), st.floats(0.001, 1), st.integers(0, 10**9))
def test_a_sample_has_its_share_and_both_ends(count: int, share: float, seed: int) -> None:
    granules = sampled_granules(count, share, (seed, 3))
    assert granules[0] == 0
    assert granules[-1] == count - 1
    assert len(set(granules.tolist())) == len(granules)
    assert abs(len(granules) - count * share) <= 2 + 6 * (count * share * (1 - share)) ** 0.5
    assert granules.tolist() == sampled_granules(count, share, (seed, 3)).tolist()


def test_a_sample_reads_less_and_finds_what_it_reads(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS, hidden=256, vocab=8001)
    root = write_checkpoint(open_storage(tmp_path), 9, ParallelLayout(), LAYERS, tensors, values(tensors))
    result = verify(tmp_path, share=0.2)
    assert result.ok
    assert 0 < result.bytes_read < 0.7 * result.data_bytes == 0.7 * root.parts[0].data_bytes
    read = sampled_granules(-(-root.parts[0].data_bytes // GRANULE_BYTES), 0.2, (0, 0))
    assert len(read) * GRANULE_BYTES >= result.bytes_read
    path = tmp_path / "step-000000009" / root.parts[0].data
    flip(path, int(read[1]) * GRANULE_BYTES + 77)
    [fault] = verify(tmp_path, share=0.2).faults
    assert fault.offset == int(read[1]) * GRANULE_BYTES


def test_the_manifest_alone_tells_sizes_indexes_and_cover(tmp_path: Path) -> None:
    root = make(tmp_path)
    result = verify(tmp_path, share=0)
    assert (result.ok, result.bytes_read) == (True, 0)
    folder = tmp_path / "step-000000009"
    flip(folder / root.parts[1].data, 5000)
    assert verify(tmp_path, share=0).ok
    (folder / root.parts[0].data).unlink()
    with (folder / root.parts[2].data).open("ab") as file:
        file.write(b"x")
    flip(folder / root.parts[3].index, 70)
    found = {fault.file.rpartition("/")[2]: fault.what for fault in verify(tmp_path, share=0).faults}
    assert set(found) == {"part-00000.safetensors", "part-00002.safetensors", "part-00003.index"}
    assert "is missing" in found["part-00000.safetensors"]


def test_all_damage_is_listed_not_only_the_first(tmp_path: Path) -> None:
    root = make(tmp_path)
    folder = tmp_path / "step-000000009"
    last = folder / root.parts[0].data
    flip(last, root.parts[0].data_bytes - 1)
    flip(folder / root.parts[1].data, 4096)
    (folder / root.parts[2].data).unlink()
    (folder / root.parts[3].index).unlink()
    faults = {fault.file.rpartition("/")[2]: fault for fault in verify(tmp_path).faults}
    assert set(faults) == {
        "part-00000.safetensors",
        "part-00001.safetensors",
        "part-00002.safetensors",
        "part-00003.index",
    }
    assert "is missing" in faults["part-00002.safetensors"].what
    assert faults["part-00002.safetensors"].tensors


class Away(LocalStorage):
    """A server that does not answer for some files."""

    suffix = ""

    def local_path(self, key: str) -> None:  # type: ignore[override]
        return None

    def info(self, key: str) -> ObjectInfo | None:
        self._answer(key)
        return super().info(key)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._answer(key)
        return super().read_ranges(key, ranges)

    def _answer(self, key: str) -> None:
        if key.endswith(self.suffix):
            raise StorageError("no answer")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in super().list(prefix):
            self._answer(item.key)
            yield item


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("suffix", ["00002.safetensors", "00002.index"])
def test_a_file_that_cannot_be_reached_is_no_damage(share: float, suffix: str, tmp_path: Path) -> None:
    make(tmp_path)
    storage = Away(tmp_path)
    storage.suffix = suffix
    with CheckpointReader(storage, 9) as reader, pytest.raises(StorageError, match="no answer"):
        verify_checkpoint(reader, share=share)


def test_a_file_that_grew_or_shrank_is_found(tmp_path: Path) -> None:
    root = make(tmp_path)
    folder = tmp_path / "step-000000009"
    for number, content in enumerate((b"x", None)):
        path = folder / root.parts[number].data
        data = path.read_bytes()
        path.write_bytes(data + content if content else data[:-1])
    faults = verify(tmp_path).faults
    assert [fault.file.rpartition("/")[2] for fault in faults] == ["part-00000.safetensors", "part-00001.safetensors"]
    for fault, part in zip(faults, root.parts, strict=False):
        assert fault.what.endswith(f" bytes, not {part.data_bytes}")
        assert fault.tensors


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["safetensors", "index", "root.json"])
def test_bytes_behind_the_end_of_a_file_are_found_on_any_storage(tmp_path: Path, name: str, share: float) -> None:
    for storage in (open_storage(tmp_path), open_storage(f"memory://{uuid.uuid4().hex}")):
        root = write_checkpoint(storage, 9, ParallelLayout(), 1, SMALL, values(SMALL))
        part = root.parts[0]
        key = f"step-000000009/{ {'safetensors': part.data, 'index': part.index}.get(name, name) }"
        storage.write(key, storage.read(key) + b"\n")
        if name == "root.json":
            with pytest.raises(CheckFailed, match="its checksum differs"):
                CheckpointReader(storage, 9)
            continue
        with CheckpointReader(storage, 9) as reader:
            [fault] = verify_checkpoint(reader, share=share).faults
        assert fault.file == key.removeprefix("step-000000009/")
        assert " bytes, not " in fault.what


@pytest.mark.parametrize("work", [verify_checkpoint, hash_checkpoint, CheckpointReader.stored.func])
def test_a_step_that_is_pruned_while_it_is_read_is_reported_as_that(
    tmp_path: Path, work: Callable[[CheckpointReader], object]
) -> None:
    storage = open_storage(tmp_path)
    for step in (7, 9):
        write_checkpoint(storage, step, ParallelLayout(), 1, SMALL, values(SMALL))
    with CheckpointReader(storage, 7) as reader:
        storage.delete(storage.list_keys("step-000000007/"))
        with pytest.raises(StorageError, match=r"step 7 of .* was pruned while it was read") as caught:
            work(reader)
    assert caught.value.hint == f"read the newest one: {storage.url}/step-000000009"


def test_a_lost_file_is_told_with_the_tensors_that_it_holds_and_no_others(tmp_path: Path) -> None:
    root = make(tmp_path, max_chunks=9)
    part = root.parts[1]
    with CheckpointReader(open_storage(tmp_path), 9) as reader:
        chunks = reader.files.read_index(part).chunks
        names = {chunks.names[tensor] for tensor in chunks.tensor.tolist()}
        assert 0 < len(names) <= 9 < len(chunks.names), "a writer's indexes list the tensors of all its files"
        (tmp_path / "step-000000009" / part.data).unlink()
        [fault] = verify_checkpoint(reader).faults
        assert set(fault.tensors) == names
        with pytest.raises(CheckFailed, match="is missing, where") as caught:
            hash_checkpoint(reader)
    first, *others = caught.value.message.partition(", where ")[2].partition(" and ")[0].split(", ")
    assert {first, *others} <= names


@pytest.mark.parametrize("operation", ["read_ranges", "list"])
def test_a_request_without_an_answer_is_not_damage(tmp_path: Path, operation: str) -> None:
    make(tmp_path)
    storage = FaultStorage(open_storage(tmp_path), Fault(StorageError("no answer from the server"), (operation,)))
    with CheckpointReader(storage, 9) as reader, pytest.raises(StorageError, match="no answer"):
        verify_checkpoint(reader, share=0)


@pytest.mark.parametrize("call", ["open_part", "read_part"])
def test_a_part_that_cannot_be_read_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def away(*_: object) -> None:
        raise StorageError("no answer from the server")

    make(tmp_path)
    with CheckpointReader(open_storage(tmp_path), 9) as reader:
        monkeypatch.setattr(StepFiles, call, away)
        with pytest.raises(StorageError, match="no answer"):
            verify_checkpoint(reader, share=1)


def test_an_index_of_more_chunks_than_a_file_may_hold_is_a_fault(tmp_path: Path) -> None:
    make(tmp_path)
    with CheckpointReader(open_storage(tmp_path), 9) as reader:
        for number, index in enumerate(reader.files.read_indexes()):
            assert check_data(reader, number, index)[1] == []
            num_read, [fault] = check_data(reader, number, index, max_chunks=3)
            assert (num_read, fault.file) == (0, reader.root.parts[number].index)
            assert fault.what == f"{len(index.chunks)} chunks, a file has at most 3"


def test_files_of_another_rank_under_right_checksums_are_found(tmp_path: Path) -> None:
    """Two parts swapped together with their index entries: each file is sound, the tensors are not whole."""
    root = make(tmp_path)
    doubled = (root.parts[0], *(Part(root.parts[n].data, root.parts[0].data_bytes, root.parts[n].index,
               root.parts[0].index_bytes, root.parts[0].index_xxh3) for n in (1,)), *root.parts[2:])  # fmt: skip
    folder = tmp_path / "step-000000009"
    for kind in ("data", "index"):
        source, target = (folder / getattr(root.parts[n], kind) for n in (0, 1))
        target.write_bytes(source.read_bytes())
    fake = Root(9, root.attempt, root.layout, LAYERS, root.tensors, doubled, {})
    (folder / ROOT_KEY).write_bytes(fake.to_bytes())
    faults = verify(tmp_path).faults
    assert faults
    assert all("stored more than once" in f.what or "are missing" in f.what for f in faults[:MAX_SEARCHED])
    assert all(fault.what.endswith("bytes are stored, not each once") for fault in faults[MAX_SEARCHED:])


def test_the_share_of_one_node_is_sound_though_not_whole_unless_something_is_in_it_twice(tmp_path: Path) -> None:
    root = make(tmp_path)
    path = tmp_path / "step-000000009" / ROOT_KEY
    path.write_bytes(replace(root, parts=root.parts[2:], share=Share(first=2, count=2, of=4)).to_bytes())
    assert verify(tmp_path).ok
    folder = path.parent
    for kind in ("data", "index"):
        copy = folder / getattr(root.parts[0], kind)
        copy.write_bytes((folder / getattr(root.parts[2], kind)).read_bytes())
    twice = replace(root.parts[2], data=root.parts[0].data, index=root.parts[0].index)
    path.write_bytes(replace(root, parts=(twice, root.parts[2]), share=Share(first=0, count=3, of=4)).to_bytes())
    faults = verify(tmp_path).faults
    assert faults
    assert "bytes are stored more than once, first [" in faults[0].what
    assert not any("missing" in fault.what for fault in faults)


def test_a_header_that_its_index_does_not_describe_is_found(tmp_path: Path) -> None:
    """A header rewritten with right checksums would mislead other safetensors readers."""
    root = make(tmp_path)
    part, folder = root.parts[0], tmp_path / "step-000000009"
    data = bytearray((folder / part.data).read_bytes())
    at = data.index(b"embed.weight@0")
    data[at : at + 5] = b"tebed"
    (folder / part.data).write_bytes(data)
    with CheckpointReader(open_storage(tmp_path), 9) as reader:
        old = reader.files.read_index(reader.root.parts[0])
    index = type(old)(old.chunks, old.data_offset, old.size_bytes, checksums(bytes(data))).to_bytes()
    (folder / part.index).write_bytes(index)
    parts = (Part(part.data, part.data_bytes, part.index, len(index), xxh3_64(index)), *root.parts[1:])
    (folder / ROOT_KEY).write_bytes(Root(9, root.attempt, root.layout, LAYERS, root.tensors, parts, {}).to_bytes())
    assert [fault.what for fault in verify(tmp_path).faults] == [
        "its safetensors header is not the one that its index describes"
    ]
