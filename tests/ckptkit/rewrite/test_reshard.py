"""Reshard: the bytes a save of the target layout would have written, read once, committed or not there at all."""

import errno
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.check.hash import hash_checkpoint
from ckptkit.check.verify import verify_checkpoint
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.root import Share
from ckptkit.format.saved import Saved
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Cut, Placement, TensorInfo
from ckptkit.rewrite.reshard import reshard
from ckptkit.rewrite.target_files import FileWriter
from ckptkit.writer.commit import commit_root
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage, open_storage
from threefold.storage.fault import Fault, FaultStorage

LAYERS = 5
layouts = st.builds(
    lambda tp, cp, ep, dp, pp, virtual: ParallelLayout(tp, cp, ep if dp * cp % ep == 0 else 1, dp, pp, virtual),
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3),
    st.integers(1, 2),
)  # fmt: skip
# cut by ep and tp, by both along one dim, and into fewer parts than there are ranks
EXPERTS = [
    TensorInfo("layers.1.experts.up.weight", "F32", (12, 16, 5), Placement(1, (Cut(0, "ep"), Cut(1)))),
    TensorInfo("layers.1.experts.down.weight", "F32", (96, 5), Placement(1, (Cut(0, "ep"), Cut(0)))),
    TensorInfo("layers.2.attn.k.bias", "F32", (32,), Placement(2, (Cut(0, max_parts=2),))),
]


def data_files(storage: Storage, step: int) -> list[bytes]:
    root = CheckpointReader(storage, step).root
    return [storage.read(f"{step_folder(step)}/{part.data}") for part in root.parts]


@settings(max_examples=settings().max_examples // 6)
@given(first=layouts, second=layouts, tied=st.booleans())
@pytest.mark.ci
@pytest.mark.slow
def test_the_target_is_what_its_ranks_would_have_saved(
    tmp_path_factory: pytest.TempPathFactory, first: ParallelLayout, second: ParallelLayout, tied: bool
) -> None:
    tensors = gpt_tensors(LAYERS, tied=tied, hidden=128, kv=32, ffn=264, vocab=1001) + EXPERTS
    arrays = values(tensors)
    base = tmp_path_factory.mktemp("reshard")
    source, target, expected = (open_storage(base / name) for name in ("source", "target", "expected"))
    write_checkpoint(source, 7, first, LAYERS, tensors, arrays)
    write_checkpoint(expected, 7, second, LAYERS, tensors, arrays)
    with CheckpointReader(source, 7) as reader:
        report = reshard(reader, target, second, slab_bytes=1 << 20)
        digest = hash_checkpoint(reader)
    assert report.bytes_read <= 1.05 * sum(part.data_bytes for part in reader.root.parts)
    assert data_files(target, 7) == data_files(expected, 7)
    with CheckpointReader(target, 7) as reader:
        assert reader.root.layout == second
        assert reader.root.metadata == {"tokens": 5}
        assert verify_checkpoint(reader).ok
        assert hash_checkpoint(reader, slab_bytes=1 << 20) == digest


def test_mixed_dtypes_and_several_files_a_writer(tmp_path: Path) -> None:
    tensors = gpt_tensors(2, dtype="BF16") + [
        type(info)(f"optim.master/{info.name}", "F32", info.shape, info.placement)
        for info in gpt_tensors(2)
        if "/" not in info.name
    ]
    arrays = values(tensors)
    source, target = open_storage(tmp_path / "source"), open_storage(tmp_path / "target")
    write_checkpoint(source, 1, ParallelLayout(tp=2, dp=2), 2, tensors, arrays, max_chunks=9)
    with CheckpointReader(source, 1) as reader:
        assert len(reader.root.parts) > 4
        reshard(reader, target, ParallelLayout(pp=2))
        before = hash_checkpoint(reader)
    with CheckpointReader(target, 1) as reader:
        assert hash_checkpoint(reader) == before
        assert verify_checkpoint(reader).ok


def make_source(folder: Path) -> Storage:
    tensors = gpt_tensors(LAYERS)
    storage = open_storage(folder)
    write_checkpoint(storage, 3, ParallelLayout(tp=2, dp=2), LAYERS, tensors, values(tensors))
    return storage


def test_a_layout_that_does_not_divide_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with CheckpointReader(make_source(tmp_path / "source"), 3) as reader:
        with pytest.raises(UserError, match=r"cannot cut .* into tp=3 along dim") as caught:
            reshard(reader, open_storage(tmp_path / "target"), ParallelLayout(tp=3))
        assert caught.value.hint
        assert caught.value.hint.startswith("choose tp from 1, 2, 4")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("layout", "step", "message"),
    [
        (ParallelLayout(dp=1_000_000), None, "has 1,000,000 ranks"),
        (ParallelLayout(), -1, "step -1 is not a whole number"),
    ],
)
def test_what_cannot_be_written_is_refused(
    layout: ParallelLayout, step: int | None, message: str, tmp_path: Path
) -> None:
    tensors = gpt_tensors(1)
    source, target = open_storage(tmp_path / "source"), open_storage(tmp_path / "target")
    write_checkpoint(source, 1, ParallelLayout(), 1, tensors, values(tensors))
    with CheckpointReader(source, 1) as reader, pytest.raises(UserError, match=message):
        reshard(reader, target, layout, step=step)
    assert not (tmp_path / "target").exists()


def test_one_nodes_part_of_a_step_is_refused_and_not_called_damage(tmp_path: Path) -> None:
    tensors = gpt_tensors(2)
    source, target = open_storage(tmp_path / "source"), open_storage(tmp_path / "target")
    root = write_checkpoint(source, 1, ParallelLayout(dp=2), 2, tensors, values(tensors))
    part = replace(root, parts=root.parts[:1], share=Share(first=0, count=1, of=2))
    source.write(f"{step_folder(1)}/{ROOT_KEY}", part.to_bytes())
    with CheckpointReader(source, 1) as reader:
        for work in (lambda: reshard(reader, target, ParallelLayout()), lambda: hash_checkpoint(reader)):
            with pytest.raises(UserError, match=r"one node's part of the step only, writer 0 of 2") as caught:
                work()
            assert caught.value.exit_code == 2
    source.write(f"{step_folder(1)}/{ROOT_KEY}", replace(root, share=Share(first=0, count=2, of=2)).to_bytes())
    with CheckpointReader(source, 1) as reader:
        reshard(reader, target, ParallelLayout())
        digest = hash_checkpoint(reader)
    with CheckpointReader(target, 1) as reader:
        assert reader.root.share is None
        assert hash_checkpoint(reader) == digest


def test_a_certificate_goes_along(tmp_path: Path) -> None:
    source, target = make_source(tmp_path / "source"), open_storage(tmp_path / "target")
    signed = replace(read_root(source, 3), certificate={"by": "somebody"})
    source.write(f"{step_folder(3)}/{ROOT_KEY}", signed.to_bytes())
    with CheckpointReader(source, 3) as reader:
        reshard(reader, target, ParallelLayout(tp=4))
    assert read_root(target, 3).certificate == {"by": "somebody"}


def test_a_step_that_is_there_is_not_touched(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    before = source.read("step-000000003/root.json")
    with CheckpointReader(source, 3) as reader, pytest.raises(UserError, match="already holds step 3"):
        reshard(reader, source, ParallelLayout())
    assert source.read("step-000000003/root.json") == before
    with CheckpointReader(source, 3) as reader:
        assert reshard(reader, source, ParallelLayout(), step=4).step == 4


def test_damage_in_the_source_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    with CheckpointReader(source, 3) as reader:
        path = source.local_path(f"step-000000003/{reader.root.parts[1].data}")
        assert path is not None
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
        with pytest.raises(
            CheckFailed, match=r"part-00001.safetensors is damaged between bytes 0 and 1048576, where .*weight"
        ):
            reshard(reader, open_storage(tmp_path / "target"), ParallelLayout())
    assert [path for path in (tmp_path / "target").rglob("*") if path.is_file()] == []


def full_disk(storage: Storage, fails_at: int) -> Storage:
    """A storage on which the n-th write fails as a full disk does, local or not."""
    error = StorageError("no space left")
    error.__cause__ = OSError(errno.ENOSPC, "no space left")
    return FaultStorage(storage, Fault(error, ("write",), after=fails_at))


@pytest.mark.parametrize("fails_at", range(0, 17, 4))
def test_a_write_that_fails_leaves_no_checkpoint_and_the_same_call_goes_on(tmp_path: Path, fails_at: int) -> None:
    with CheckpointReader(make_source(tmp_path / "source"), 3) as reader:
        target = full_disk(open_storage(tmp_path / "target"), fails_at)
        with pytest.raises(StorageError, match="no space left"):
            reshard(reader, target, ParallelLayout(tp=2, pp=4))
        assert target.info(f"{step_folder(3)}/{ROOT_KEY}") is None
        whole = full_disk(open_storage(tmp_path / "target"), 17)
        report = reshard(reader, whole, ParallelLayout(tp=2, pp=4))
        assert (report.num_files, report.bytes_kept > 0 or fails_at < 16) == (8, True)
        assert whole.info(f"{step_folder(3)}/{ROOT_KEY}") is not None


def test_on_a_local_disk_a_failure_leaves_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(FileWriter, "finish", fail)
    with CheckpointReader(make_source(tmp_path / "source"), 3) as reader, pytest.raises(StorageError, match="no space"):
        reshard(reader, open_storage(tmp_path / "target"), ParallelLayout(tp=2))
    assert not (tmp_path / "target").exists()


def test_a_root_whose_answer_was_lost_is_there(tmp_path: Path) -> None:
    target = open_storage(tmp_path / "target")
    lost = Fault(StorageError("no answer from the server"), ("write",), f"*/{ROOT_KEY}", served=True)
    with CheckpointReader(make_source(tmp_path / "source"), 3) as reader:
        assert reshard(reader, FaultStorage(target, lost), ParallelLayout(tp=2)).num_missing == 0
    with CheckpointReader(target, 3) as reader:
        assert verify_checkpoint(reader).ok


@pytest.mark.parametrize("is_local", [True, False])
def test_two_equal_reshards_at_once_harm_nothing(tmp_path: Path, is_local: bool) -> None:
    """On a local disk the second is refused; elsewhere both end well."""
    source = make_source(tmp_path / "source")
    target = open_storage(tmp_path / "target" if is_local else f"memory:/{tmp_path}/target")
    refused: list[bool] = []

    def rival(done: int, total: int) -> None:
        with CheckpointReader(source, 3) as reader:
            try:
                reshard(reader, target, ParallelLayout(tp=2))
            except UserError as error:
                refused.append("another process writes the same into" in error.message)
            else:
                refused.append(False)

    with CheckpointReader(source, 3) as reader:
        assert reshard(reader, target, ParallelLayout(tp=2), progress=rival).num_missing == 0
    assert refused[0] == is_local
    with CheckpointReader(target, 3) as reader:
        assert verify_checkpoint(reader).ok


def test_a_reshard_that_fails_beside_an_equal_one_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_source(tmp_path / "source"), open_storage(f"memory:/{tmp_path}/target")
    begun, written, ended, usual = Event(), Event(), Event(), commit_root

    def fail(done: int, total: int) -> None:
        begun.set()
        assert written.wait(20)
        raise StorageError("no space left")

    def rival() -> None:
        with CheckpointReader(source, 3) as reader, pytest.raises(StorageError, match="no space left"):
            reshard(reader, target, ParallelLayout(tp=2), progress=fail)
        ended.set()

    def commit(*arguments: Any) -> None:
        written.set()
        assert ended.wait(20)
        usual(*arguments)

    monkeypatch.setattr("ckptkit.rewrite.reshard.commit_root", commit)
    with ThreadPoolExecutor(1) as pool, CheckpointReader(source, 3) as reader:
        other = pool.submit(rival)
        assert begun.wait(20)
        reshard(reader, target, ParallelLayout(tp=2))
        other.result()
    with CheckpointReader(target, 3) as reader:
        assert verify_checkpoint(reader).ok


def test_swapping_two_elements_changes_the_hash(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS)
    arrays = values(tensors)
    hashes = []
    for name in ("one", "two"):
        storage = open_storage(tmp_path / name)
        write_checkpoint(storage, 1, ParallelLayout(tp=2), LAYERS, tensors, arrays)
        with CheckpointReader(storage, 1) as reader:
            hashes.append(hash_checkpoint(reader))
        flat = arrays["optim.exp_avg/layers.2.mlp.up.weight"].reshape(-1)
        flat[[3, 4]] = flat[[4, 3]]
    changed = [name for name in hashes[0].tensors if hashes[0].tensors[name] != hashes[1].tensors[name]]
    assert changed == ["optim.exp_avg/layers.2.mlp.up.weight"]
    assert hashes[0].params == hashes[1].params
    assert hashes[0].optim != hashes[1].optim
    assert hashes[0].all != hashes[1].all


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with CheckpointReader(make_source(tmp_path / "source"), 3) as reader:
        report = reshard(
            reader, open_storage(tmp_path / "target"), ParallelLayout(), progress=lambda *at: seen.append(at)
        )
    assert seen[-1] == (report.bytes_needed, report.bytes_needed)
    assert np.all(np.diff([done for done, _ in seen]) >= 0)


def test_the_same_reshard_again_keeps_what_it_made(tmp_path: Path) -> None:
    """As one that was killed when its root was put; another save of the step is refused as before."""
    source, target = make_source(tmp_path / "source"), open_storage(tmp_path / "target")
    root = replace(read_root(source, 3), saved=Saved.now(code="", write_s=1.0, commit_s=0.5))
    source.delete(["step-000000003/root.json"])
    source.write("step-000000003/root.json", root.to_bytes())
    with CheckpointReader(source, 3) as reader:
        first = reshard(reader, target, ParallelLayout(dp=2))
        before = {item.key: target.read(item.key) for item in target.list()}
        again = reshard(reader, target, ParallelLayout(dp=2))
        assert (again.num_files, again.bytes_written, again.url) == (first.num_files, 0, first.url)
        with pytest.raises(UserError, match="already holds step 3"):
            reshard(reader, target, ParallelLayout())
    other = replace(root, saved=Saved.now(code="", write_s=2.0, commit_s=0.5))
    source.delete(["step-000000003/root.json"])
    source.write("step-000000003/root.json", other.to_bytes())
    with CheckpointReader(source, 3) as reader, pytest.raises(UserError, match="already holds step 3"):
        reshard(reader, target, ParallelLayout(dp=2))
    assert {item.key: target.read(item.key) for item in target.list()} == before
