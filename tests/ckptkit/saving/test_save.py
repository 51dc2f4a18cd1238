"""`ckptkit.save`: one call, and the step is committed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.check.verify import verify_checkpoint
from ckptkit.format.keys import Seat
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.saving import save as saving
from ckptkit.writer.commit import KILLED
from ckptkit.writer.step import clear, discard, report_failed
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import NUM_LAYERS, ONE, SMALL, assert_holds, pieces_of
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, ObjectInfo, open_storage
from threefold.storage.local import LocalStorage


def save(url: object, step: int, layout: ParallelLayout = ONE, rank: int = 0, **more: object) -> ckptkit.Root | None:
    return ckptkit.save(
        str(url), step, pieces_of(SMALL, layout, rank, values(SMALL)), tensors=SMALL, layout=layout,
        num_layers=NUM_LAYERS, metadata={"scale": 1}, rank=rank, world_size=layout.world_size, **more,
    )  # fmt: skip


@pytest.mark.parametrize("block_bytes", [saving.BOUNCE_BYTES, 1 << 20])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_step_is_committed_on_return(
    place: str, block_bytes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if place == "local" else request.getfixturevalue("s3_url")
    root = save(url, 3, block_bytes=block_bytes)
    assert root is not None
    assert root.metadata == {"scale": 1}
    assert_holds(url, 3, SMALL)
    with CheckpointReader(open_storage(url), 3) as reader:
        assert verify_checkpoint(reader).ok
    with pytest.raises(AlreadyExists, match=r"step 3 of .* is committed already"):
        save(url, 3)


def test_blocks_of_many_pieces_and_pieces_of_many_blocks(tmp_path: Path) -> None:
    sizes = [3 << 20, 100, 1 << 20, 700_000, 700_000, 5 << 20]
    tensors = [ckptkit.TensorInfo(f"layers.{n}.w", "U8", (size,), ckptkit.Placement(n)) for n, size in enumerate(sizes)]
    arrays = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)]
    pieces = [ckptkit.Piece.whole(t.name, ckptkit.Box((0,), t.shape), a) for t, a in zip(tensors, arrays, strict=True)]
    how = {"tensors": tensors, "layout": ONE, "num_layers": len(sizes), "metadata": {}}
    ckptkit.save(str(tmp_path), 1, pieces, **how, block_bytes=1 << 20)
    restored = [ckptkit.Piece(p.name, p.box, p.start, p.stop, np.zeros_like(p.data)) for p in pieces]
    ckptkit.restore(str(tmp_path), 1, restored)
    assert all((a.data == b.data).all() for a, b in zip(restored, pieces, strict=True))


def test_ranks_share_an_attempt(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    with pytest.raises(UserError, match="a save of 4 ranks needs an attempt"):
        save(tmp_path, 1, layout)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(save, tmp_path, 1, layout, rank, attempt="x") for rank in (1, 2, 3)]
        root = save(tmp_path, 1, layout, attempt="x")
        assert [other.result() for other in others] == [None] * 3
    assert root is not None
    assert len(root.parts) == 4
    assert_holds(tmp_path, 1, SMALL)


def test_one_process_saves_all_ranks_one_after_the_other(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    for rank in (3, 2, 1):
        assert save(tmp_path, 1, layout, rank, attempt="x", awaits_commit=False) is None
        assert committed_steps(open_storage(tmp_path)) == []
    assert save(tmp_path, 1, layout, attempt="x", awaits_commit=False) is not None
    assert_holds(tmp_path, 1, SMALL)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    late = r"writer 1 of 2 was not done within 0\.[0-9] s"
    with pytest.raises(StorageError, match=late):
        save(tmp_path, 1, ParallelLayout(dp=2), attempt="x", deadline_s=0.2)
    assert list(open_storage(tmp_path).list_keys()) == ["step-000000001/x/part-00000.failed"]
    with pytest.raises(StorageError, match=f"step 1 of .* is not committed: writer 0 failed: .*{late}"):
        save(tmp_path, 1, ParallelLayout(dp=2), 1, attempt="x")
    assert list(open_storage(tmp_path).list_keys()) == ["step-000000001/x/part-00000.failed"]


def test_no_rank_takes_a_step_for_saved_that_is_not(tmp_path: Path) -> None:
    """One rank stores another's pieces, so the step cannot be committed; all learn why, and nothing but that stays."""
    layout = ParallelLayout(dp=3)
    doubled = pieces_of(SMALL, layout, 1, values(SMALL))
    common = {"tensors": SMALL, "layout": layout, "num_layers": NUM_LAYERS, "metadata": {}, "world_size": 3}
    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(ckptkit.save, str(tmp_path), 1, doubled, rank=rank, attempt="x", **common) for rank in (1, 2)
        ]
        with pytest.raises(CheckFailed, match=r"stored more than once, first \[.*\], by writers 1, 2"):
            save(tmp_path, 1, layout, attempt="x")
        for other in others:
            with pytest.raises(StorageError, match=r"not committed: writer 0 failed: (?s:.*) by writers 1, 2"):
                other.result()
    assert list(open_storage(tmp_path).list_keys()) == ["step-000000001/x/part-00000.failed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attempt": "../x"}, "attempt '../x' is not a name"),
        ({"step": -1}, "step -1 is not a whole number from 0"),
        ({"step": 10**15}, "is not a whole number from 0"),
        ({"step": 1.5}, "is not a whole number from 0"),
        ({"metadata": {"seen": {1}}}, "the metadata of a save is not JSON"),
    ],
)
def test_what_no_root_could_name_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    arguments = {"step": 1, "tensors": SMALL, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {}} | change
    with pytest.raises(UserError, match=message):
        ckptkit.save(str(tmp_path), pieces=pieces_of(SMALL, ONE, 0, values(SMALL)), **arguments)
    assert list(tmp_path.iterdir()) == []
    if "attempt" not in change:
        with ckptkit.Checkpointer(str(tmp_path), attempt="a") as checkpointer, pytest.raises(UserError, match=message):
            checkpointer.save(pieces=pieces_of(SMALL, ONE, 0, values(SMALL)), **arguments)
    with pytest.raises(UserError, match="is not a name"):
        ckptkit.Checkpointer(str(tmp_path), attempt="x" * 128)  # no room for the number of a save


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
    common = {"tensors": SMALL, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {}}
    with pytest.raises(CheckFailed, match="does not hold each element of each tensor exactly once"):
        ckptkit.save(str(tmp_path), 1, pieces[1:], **common)
    with pytest.raises(UserError, match="not contiguous"):
        ckptkit.save(str(tmp_path), 1, [ckptkit.Piece(p.name, p.box, p.start, p.stop, np.repeat(p.data, 2)[::2])
                                        for p in pieces], **common)  # fmt: skip
    assert list(open_storage(tmp_path).list()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*file"):
        save(tmp_path / "file", 1)
    assert committed_steps(open_storage(tmp_path)) == []


def test_what_no_reader_would_take_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="names one step") as caught:
        save(f"{tmp_path}/step-000000002", 2)
    assert caught.value.hint == str(tmp_path)
    pieces, common = pieces_of(SMALL, ONE, 0, values(SMALL)), {"layout": ONE, "num_layers": 1, "metadata": {}}
    with pytest.raises(UserError, match="rank 1 is not one of the 1 ranks"):
        ckptkit.save(str(tmp_path), 2, pieces, tensors=SMALL, rank=1, **common)
    with pytest.raises(UserError, match="listed twice"):
        ckptkit.save(str(tmp_path), 2, pieces, tensors=[*SMALL, SMALL[0]], **common)
    for data, said in [
        (np.zeros(16, np.int32), "norm.weight: F32, and a piece's memory is int32"),
        ([0.0] * 16, "norm.weight: F32, and a piece's memory is a list"),
    ]:
        with pytest.raises(UserError, match=said):
            ckptkit.save(str(tmp_path), 2, [*pieces[:-1], replace(pieces[-1], data=data)], tensors=SMALL, **common)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_lost_takes_no_file_of_a_winner_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, attempt="a")
    looked_for = list[str]()

    def too_early(storage: LocalStorage, key: str) -> ObjectInfo | None:
        looked_for.append(key)
        return None if len(looked_for) == 1 else info(storage, key)

    info = LocalStorage.info
    monkeypatch.setattr(LocalStorage, "info", too_early)
    with pytest.raises(AlreadyExists, match="by another attempt first"):
        save(tmp_path, 1, attempt="a")
    assert looked_for[0] == "step-000000001/root.json"
    assert_holds(tmp_path, 1, SMALL)


@pytest.mark.parametrize("writer", [0, 1])
def test_what_a_killed_writer_was_about_is_removed_unless_it_is_committed(tmp_path: Path, writer: int) -> None:
    save(tmp_path, 1, attempt="a")
    storage = open_storage(tmp_path)
    before = list(storage.list_keys())
    committed = Seat("", 1, "a", writer, num_writers=2)
    for act in (partial(discard, reason=KILLED), partial(report_failed, reason=KILLED), clear):
        act(storage, committed)
        assert list(storage.list_keys()) == before
    storage.write("step-000000002/b/part-00000.safetensors", b"half")
    seat = Seat("", 2, "b", writer, num_writers=2)
    discard(storage, seat, KILLED)
    left = [f"part-0000{writer}.failed", *(["part-00000.safetensors"] if writer else [])]
    assert sorted(set(storage.list_keys()) - set(before)) == sorted(f"step-000000002/b/{name}" for name in left)
    discard(storage, seat, "another reason")
    assert storage.read(f"step-000000002/b/part-0000{writer}.failed").decode() == KILLED, "the first word stays"
    clear(storage, seat)
    assert list(storage.list_keys()) == before
    alone = Seat("", 2, "b")
    assert report_failed(storage, alone, KILLED), "there is nobody to be told"
    assert list(storage.list_keys()) == before


def test_of_two_ranks_that_hold_one_part_one_saves_and_both_load(tmp_path: Path) -> None:
    """Two key heads over four ranks: the step of the first replicas is committed, that of all four is refused."""
    keys = ckptkit.TensorInfo("k", "F32", (4, 3), ckptkit.Placement(0, (ckptkit.Cut(0, max_parts=2),)))
    layout, whole = ParallelLayout(tp=4), np.arange(12, dtype=np.float32).reshape(4, 3)
    boxes = [keys.placement.local_box("k", keys.shape, layout, layout.coords(rank)) for rank in range(4)]
    parts = [whole[box.offset[0] : box.offset[0] + 2].flatten() for box in boxes]

    def save_step(step: int, savers: list[int]) -> None:
        for rank in (3, 2, 1, 0):
            pieces = [ckptkit.Piece.whole("k", boxes[rank], parts[rank])] if rank in savers else []
            ckptkit.save(
                str(tmp_path), step, pieces, tensors=[keys], layout=layout, num_layers=1, metadata={}, rank=rank,
                world_size=4, attempt="x", awaits_commit=False,
            )  # fmt: skip

    with pytest.raises(CheckFailed, match=r"k: .* stored more than once, first \[0:2, 0:3\], by writers 0, 1"):
        save_step(1, [0, 1, 2, 3])
    save_step(2, [rank for rank in range(4) if keys.placement.is_first_replica(layout, layout.coords(rank))])
    for box, part in zip(boxes, parts, strict=True):
        piece = ckptkit.Piece.whole("k", box, np.zeros(6, np.float32))
        ckptkit.restore(str(tmp_path), 2, [piece], tensors=[keys])
        assert np.array_equal(piece.data, part)
