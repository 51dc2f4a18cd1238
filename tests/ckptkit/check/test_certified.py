"""Certificates of steps: the same for every layout, kept by reshard, and compared wherever a step is read whole."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.verify import NOT_AS_SAVED, Verification, verify_checkpoint
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.part_copy import is_whole
from ckptkit.format.root import Root
from ckptkit.io.blocks import NOWHERE
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.load_sums import LoadSums
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore_from
from ckptkit.loading.roots import read_root
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.certificate import KIND, TensorSums, digest
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.saving.save import save
from tests.ckptkit.io.test_sums import crc
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, pieces_of
from tests.ckptkit.support.thread_exchange import ThreadExchange
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


def load(storage: Storage, layouts: list[ParallelLayout]) -> list[int]:
    """Return how many tensors are certified on each rank, a thread, of as many as there are layouts."""
    exchange = ThreadExchange(len(layouts))

    def restored(rank: int) -> int:
        table = {info.name: info for info in TENSORS}
        pieces = [
            replace(piece, data=np.zeros_like(piece.data))
            for piece in pieces_of(TENSORS, layouts[rank], rank % layouts[rank].world_size, ARRAYS)
            if table[piece.name].placement.tied_to is None
        ]
        with CheckpointReader(storage, 3, exchange=exchange.of(rank)) as reader:
            return restore_from(reader, pieces)

    with ThreadPoolExecutor(len(layouts)) as pool:
        return list(pool.map(restored, range(len(layouts))))


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


@pytest.mark.ci
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
    forge(storage, 3, with_sums=False)
    [fault] = verified(storage).faults
    assert fault.what == NOT_AS_SAVED
    assert fault.file == root_of(storage).parts[0].data


def test_values_that_are_not_those_of_the_certificate_are_found_and_not_resharded(tmp_path: Path) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout(tp=2)), open_storage(tmp_path / "other")
    forge(storage, 3, with_sums=True)
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
    for verify, certified in ((False, True), (False, False), (True, True)):  # what is there is not read again
        with CheckpointReader(storage, 3) as reader:
            assert copy_step(reader, target, verify=verify).certified is certified
    assert root_of(target).certificate == EXPECTED


@pytest.mark.parametrize("with_sums", [False, True])
def test_values_under_right_checksums_that_were_not_saved_are_not_copied(tmp_path: Path, with_sums: bool) -> None:
    storage, target = saved(tmp_path / "run", ParallelLayout(tp=2)), open_storage(tmp_path / "other")
    forge(storage, 3, with_sums=with_sums)
    with (
        CheckpointReader(storage, 3) as reader,
        pytest.raises(CheckFailed, match=r"values .*saved, by their sums"),
    ):
        copy_step(reader, target)
    assert target.info(f"{step_folder(3)}/{ROOT_KEY}") is None


def test_a_file_of_an_earlier_try_is_kept_only_with_the_values_that_were_saved(tmp_path: Path) -> None:
    storage = saved(tmp_path, ParallelLayout(tp=2))
    part = root_of(storage).parts[0]
    key = f"{step_folder(3)}/{part.data}"
    for is_sound in (True, False):
        with CheckpointReader(storage, 3) as reader:
            assert is_whole(storage, key, reader.files.read_index(part)) is is_sound
        forge(storage, 3, with_sums=False)
        part = root_of(storage).parts[0]


@pytest.mark.parametrize("with_sums", [False, True])
def test_values_under_right_checksums_that_were_not_saved_are_not_loaded(tmp_path: Path, with_sums: bool) -> None:
    storage, names = saved(tmp_path, ParallelLayout(tp=2, dp=2)), list(EXPECTED["tensors"])  # type: ignore[call-overload]
    assert load(storage, [ParallelLayout()]) == [len(names)]
    forge(storage, 3, with_sums=with_sums)
    with pytest.raises(CheckFailed, match="is not equal to what was saved, by the certificate"):
        load(storage, [ParallelLayout()])


def test_ranks_that_load_together_certify_what_they_hold_together(tmp_path: Path) -> None:
    """Cuts, intervals of ZeRO and replicas; what a rank holds alone is not whole."""
    storage, layout = saved(tmp_path, ParallelLayout()), ParallelLayout(tp=2, dp=2)
    assert load(storage, [layout] * 4) == [len(EXPECTED["tensors"])] * 4  # type: ignore[arg-type]
    replicas = [ParallelLayout(tp=2, dp=2), ParallelLayout(tp=2, dp=2), ParallelLayout(tp=2), ParallelLayout(tp=2)]
    assert all(0 < found < len(EXPECTED["tensors"]) for found in load(storage, replicas))  # type: ignore[arg-type]
    forge(storage, 3, with_sums=True)
    with pytest.raises(CheckFailed, match="is not equal to what was saved, by the certificate"):
        load(storage, [layout] * 4)


def test_bytes_that_change_between_ranks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a bad network: of the four ranks one alone gets another value."""
    storage, usual = saved(tmp_path, ParallelLayout()), ThreadExchange.all_to_all
    assert load(storage, [ParallelLayout()] * 4) == [len(EXPECTED["tensors"])] * 4  # type: ignore[arg-type]

    def all_to_all(exchange: ThreadExchange, send: Any) -> list[Any]:
        received = [bytearray(each) for each in usual(exchange, send)]
        if exchange.rank == 2:
            most = max(received, key=len)
            most[len(most) // 2 : len(most) // 2 + 1] = bytes([most[len(most) // 2] ^ 1])
        return received

    monkeypatch.setattr(ThreadExchange, "all_to_all", all_to_all)
    with pytest.raises(CheckFailed, match=r"by the certificate of the save:\s+\S+"):
        load(storage, [ParallelLayout()] * 4)


def test_a_rank_alone_certifies_what_it_wants_whole_and_sums_nothing_else(tmp_path: Path) -> None:
    storage, cut = saved(tmp_path, ParallelLayout()), {info.name for info in TENSORS if info.placement.cuts}
    assert load(storage, [ParallelLayout(tp=2)]) == [len(set(EXPECTED["tensors"]) - cut)]  # type: ignore[call-overload]
    wanted = ChunkTable.of_pieces(pieces_of(TENSORS, ParallelLayout(tp=2), 0, ARRAYS)[:3], TENSORS)
    names = [wanted.names[tensor] for tensor in wanted.tensor]
    zeros, sums = np.zeros(3, np.int64), LoadSums(root_of(storage), wanted, is_alone=True)
    places = sums.places(LoadPlan(zeros, zeros, np.arange(3), zeros, zeros)).places
    assert (places == NOWHERE).tolist() == [name in cut for name in names]


def test_what_comes_from_elsewhere_is_compared_too(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{tmp_path.name}-certified")
    with CheckpointReader(saved(tmp_path, ParallelLayout(tp=2)), 3) as reader:
        copy_step(reader, storage)
    assert load(storage, [ParallelLayout()]) == [len(EXPECTED["tensors"])]  # type: ignore[arg-type]
    forge(storage, 3, with_sums=True)
    with pytest.raises(CheckFailed, match="is not equal to what was saved, by the certificate"):
        load(storage, [ParallelLayout()])


def test_an_element_a_name_or_a_dtype_makes_another_certificate(tmp_path: Path) -> None:
    name = TENSORS[0].name
    changed = ARRAYS[name].copy()
    changed.reshape(-1)[:2] = changed.reshape(-1)[1::-1]
    storage = saved(tmp_path, ParallelLayout(tp=2), ARRAYS | {name: changed})
    found = root_of(storage).certificate
    assert found is not None
    same = {key for key, value in EXPECTED["tensors"].items() if found["tensors"][key] == value}  # type: ignore[attr-defined]
    assert same == set(EXPECTED["tensors"]) - {name}  # type: ignore[call-overload]
