"""The arena holds each data file as it will be written."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckptkit.format.part_index import PartIndex
from ckptkit.plan import plan_save
from ckptkit.saving.save_order import PromoteOrder, Promotion, SaveOrder, SaveOutcome, read_order
from ckptkit.saving.staging import ALIGNMENT, Area, Arena, StagedFile, stage
from ckptkit.torch_tensors import dtypes, host_address, is_contiguous, num_bytes
from tests.ckptkit.model_tables import values
from tests.ckptkit.saves import ONE, SMALL, pieces_of


@pytest.mark.parametrize("max_chunks", [100_000, 7])
def test_files_lie_whole_and_apart(max_chunks: int, tmp_path: Path) -> None:
    arena = Arena()
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
    plan = plan_save(pieces, SMALL, max_chunks=max_chunks)
    files, extra = stage(arena, pieces, SMALL, plan, b"and more")
    assert len(files) == -(-len(pieces) // max_chunks)
    assert extra.of(arena.memory).tobytes() == b"and more"
    areas = sorted([area for file in files for area in (file.data, file.index)] + [extra], key=lambda area: area.offset)
    assert all(a.offset + a.size <= b.offset for a, b in pairwise(areas))
    assert all(area.offset % ALIGNMENT == 0 for area in areas)
    found = {}
    for number, file in enumerate(files):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(file.data.of(arena.memory).tobytes())
        found |= safetensors.numpy.load_file(path)
        index = PartIndex.from_bytes(file.index.of(arena.memory).tobytes(), "index")
        assert index.size_bytes == file.data.size
    assert found.keys() == {f"{name}@0" for name in values(SMALL)}
    for name, array in values(SMALL).items():
        assert (found[f"{name}@0"] == array).all()
    arena.close()


def test_the_arena_is_reused_and_shared() -> None:
    arena = Arena()
    arena.reserve(5_000_000)
    address, size = arena.address, arena.size
    arena.reserve(4_000_000)
    assert (arena.address, arena.size) == (address, size)
    arena.put(100, b"seen by others")
    assert os.pread(arena.fd, 14, 100) == b"seen by others"
    arena.reserve(50_000_000)
    assert arena.size >= 50_000_000
    assert os.fstat(arena.fd).st_blocks * 512 >= 50_000_000  # touched, not only promised
    arena.close()


def test_orders_and_outcomes_survive_their_line() -> None:
    order = SaveOrder(
        url="s3://bucket/ü", step=3, attempt="a-0001", writer=1, num_writers=4, arena_bytes=1 << 40,
        files=(StagedFile(Area(0, 10), Area(4096, 3)), StagedFile(Area(8192, 1), Area(12288, 9))), root=Area(5, 6),
        deadline_s=1.5, keep_last=2, num_threads=3, first_writer=1,
        promotions=(Promotion("/run", "s3://b/run", 3, "a-0001", 1, 0, 4, 1, 2, False, 1, 10, 1.5, 0),),
    )  # fmt: skip
    for each in (order, PromoteOrder(order.promotions)):
        assert each.to_line().count(b"\n") == 1
        assert read_order(each.to_line()) == each
    outcome = SaveOutcome(3, 'two\nlines "quoted"', 5, 0.25)
    assert outcome.to_line().count(b"\n") == 1
    assert SaveOutcome.from_line(outcome.to_line()) == outcome


def test_arrays_and_tensors_are_described_alike() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32)
    tensor = torch.nn.Parameter(torch.from_numpy(array))
    for data in (array, tensor):
        assert (num_bytes(data), is_contiguous(data), dtypes(data)) == (24, True, ("F32",))
        assert host_address(data) == array.ctypes.data
        assert not is_contiguous(data[::2])
    assert dtypes(torch.zeros(1, dtype=torch.bfloat16)) == dtypes(np.zeros(1, np.uint16)) == ("BF16",)
    assert dtypes(np.zeros(1, np.complex64)) == ()
