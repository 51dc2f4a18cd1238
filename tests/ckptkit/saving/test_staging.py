"""The arena holds each data file as it will be written, or as much of it as its ring has room for."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckptkit.format.keys import Seat
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.handoff.block_layout import BlockLayout
from ckptkit.handoff.protocol import Area, Ring, SaveOrder, SaveOutcome, SkipOrder, StagedFile, message_of
from ckptkit.io.torch_tensors import are_contiguous, held_by, host_addresses, is_on_host, num_bytes
from ckptkit.runs.retention import Retention
from ckptkit.saving import staging as template_module
from ckptkit.saving.staging import ALIGNMENT, Arena, SaveTemplate, Staging
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import ONE, SMALL, pieces_of

SEAT = Seat("s3://bucket/ü", 3, "a-0001", 1, 4)


def sources_of(template: SaveTemplate) -> list[np.ndarray]:
    return [*(piece.data for piece in pieces_of(SMALL, ONE, 0, values(SMALL))), *template.headers]


def never() -> int:
    raise AssertionError("there is room for all")


@pytest.fixture
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SaveTemplate:
    """Of the small model, cut into files of so many chunks."""
    plan = template_module.plan_save
    monkeypatch.setattr(template_module, "plan_save", lambda *of: plan(*of, max_chunks=request.param))
    return SaveTemplate(pieces_of(SMALL, ONE, 0), SMALL, commits=True)


@pytest.mark.parametrize("template", [100_000, 7], indirect=True)
def test_files_lie_whole_and_apart(template: SaveTemplate, tmp_path: Path) -> None:
    arena = Arena()
    files, draft, ring = arena.hold(template, 0)
    assert not ring.is_window
    Staging(arena, template.block_layout, ring, sources_of(template)).run(never)
    assert arena.signals.staged.take() == ring.num_blocks
    assert Root.from_bytes(draft.of(arena.memory).tobytes(), "draft").tensors == {info.name: info for info in SMALL}
    places = [Area(ring.at(file.first_block), file.size_bytes) for file in files]
    areas = sorted([*(file.index for file in files), draft, *places], key=lambda area: area.offset)
    assert all(a.offset + a.size <= b.offset for a, b in pairwise(areas))
    assert all(area.offset % ALIGNMENT == 0 for area in areas)
    contents = {}
    for number, (file, place) in enumerate(zip(files, places, strict=True)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(place.of(arena.memory).tobytes())
        contents |= safetensors.numpy.load_file(path)
        assert PartIndex.from_bytes(file.index.of(arena.memory).tobytes(), "index").size_bytes == file.size_bytes
    assert contents.keys() == {f"{name}@0" for name in values(SMALL)}
    for name, array in values(SMALL).items():
        assert (contents[f"{name}@0"] == array).all()
    arena.close()


@pytest.mark.parametrize("on_a_thread", [True, False])
def test_a_window_is_filled_as_it_is_emptied(on_a_thread: bool) -> None:
    template = SaveTemplate(pieces_of(SMALL, ONE, 0), SMALL, commits=True)
    template.block_layout = BlockLayout.of(template.plan, len(values(SMALL)), 1 << 12)
    arena = Arena()
    files, _, ring = arena.hold(template, 3 << 12)
    assert ring.is_window
    assert (ring.num_slots, ring.num_blocks) == (3, -(-files[0].size_bytes // (1 << 12)))
    assert ring.num_blocks > 6
    staging = Staging(arena, template.block_layout, ring, sources_of(template))
    content: list[bytes] = []

    def empty_a_slot() -> int:
        at = ring.at(len(content))
        content.append(arena.memory[at : at + ring.block_bytes].tobytes())
        return 1

    if on_a_thread:
        staging.start(empty_a_slot)
        staging.join()
    else:
        staging.run(empty_a_slot)
    assert len(content) == ring.num_blocks - ring.num_slots
    while len(content) < ring.num_blocks:
        empty_a_slot()
    assert arena.signals.staged.take() == ring.num_blocks
    assert b"".join(content)[: files[0].size_bytes] == template.headers[0].tobytes() + b"".join(
        pieces_of(SMALL, ONE, 0, values(SMALL))[row].data.tobytes() for row in template.plan.rows[0]
    )
    arena.close()


def test_what_stays_the_same_is_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, template = Arena(), SaveTemplate(pieces_of(SMALL, ONE, 0), SMALL, commits=True)
    held = arena.hold(template, 0)
    monkeypatch.setattr(arena, "put", never)
    assert arena.hold(template, 0) == held
    assert template.fits(pieces_of(SMALL, ONE, 0, values(SMALL)), list(SMALL))
    assert not template.fits(pieces_of(SMALL, ONE, 0)[1:], SMALL)
    assert not template.fits(pieces_of(SMALL, ONE, 0), SMALL[1:])
    arena.close()


def test_the_arena_is_reused_and_shared() -> None:
    arena = Arena()
    arena.reserve(5_000_000)
    address, size = arena.memory.ctypes.data, arena.size
    arena.reserve(4_000_000)
    assert (arena.memory.ctypes.data, arena.size) == (address, size)
    arena.put(100, b"seen by others")
    assert os.pread(arena.fd, 14, 100) == b"seen by others"
    arena.reserve(50_000_000)
    assert arena.size >= 50_000_000
    assert os.fstat(arena.fd).st_blocks * 512 >= 50_000_000  # touched, not only promised
    arena.close()


def test_orders_and_outcomes_survive_their_line() -> None:
    order = SaveOrder(
        seat=SEAT, arena_bytes=1 << 40,
        files=(StagedFile(10, 0, Area(4096, 3)), StagedFile(1, 1, Area(12288, 9))), ring=Ring(1, 2, 3, 4),
        draft=Area(5, 6), layout={"tp": 2}, num_layers=3, metadata={"loss": 1.5}, deadline_s=1.5, retry_s=2.5,
        retention=Retention(keep_last=2, metric="größe"), code="v1", stripe_count=4, stripe_size_bytes=1 << 20,
        num_threads=3, abandoned=(replace(SEAT, step=1), SEAT),
    )  # fmt: skip
    assert order.to_line().count(b"\n") == 1
    assert message_of(order.to_line()) == order
    skip = SkipOrder(SEAT, "still saving")
    assert skip.to_line().count(b"\n") == 1
    assert message_of(skip.to_line()) == skip
    outcome = SaveOutcome(3, 'two\nlines "quoted"', 5, 0.25, 2, "warned")
    assert outcome.to_line().count(b"\n") == 1
    assert message_of(outcome.to_line()) == outcome


def test_arrays_and_tensors_are_described_alike() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32)
    tensor = torch.nn.Parameter(torch.from_numpy(array))
    for data in (array, tensor):
        assert (num_bytes(data), are_contiguous([data]), held_by(data.dtype)) == (24, True, ("F32",))
        assert (is_on_host(data), *host_addresses([data])) == (True, array.ctypes.data)
        assert not are_contiguous([data, data[::2]])
    assert held_by(torch.bfloat16) == held_by(np.dtype(np.uint16)) == ("BF16",)
    assert held_by(np.dtype(np.complex64)) == ()
