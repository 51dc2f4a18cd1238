"""Steps of a few hundred bytes on any Storage, saved in this process as the writers would, and checked byte by byte."""

from collections.abc import Callable
from functools import cache

import numpy as np

from ckptkit.check.hash import hash_checkpoint
from ckptkit.format.keys import Seat, step_folder
from ckptkit.format.root import Root
from ckptkit.io.blocks import num_granules, xxh3_64
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore_from
from ckptkit.loading.roots import read_root
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Cut, Piece, Placement, TensorInfo
from ckptkit.plan.save_plan import plan_save
from ckptkit.writer.retries import Retries
from ckptkit.writer.step import PartSource, StepTarget, write_step
from tests.ckptkit.support.checkpoints import cut
from tests.ckptkit.support.model_tables import rank_chunks
from tests.support.checks import require
from threefold.storage import Storage

NUM_LAYERS = 2
TABLE = [
    TensorInfo("embed.weight", "F32", (5, 4), Placement("first", (Cut(0),), round_to=1)),
    TensorInfo("layers.0.weight", "F32", (4, 8), Placement(0, (Cut(1),))),
    TensorInfo("layers.1.weight", "F32", (4, 8), Placement(1, (Cut(1),))),
]
LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(dp=2), ParallelLayout(tp=2, pp=2)]


@cache
def arrays(value: int) -> dict[str, np.ndarray]:
    """The tensors of a state that is known by a number."""
    rng = np.random.default_rng(value)
    return {info.name: rng.random(info.shape, np.float32) for info in TABLE}


@cache
def files(value: int, layout: ParallelLayout, rank: int) -> list[tuple[PartSource, np.ndarray]]:
    """A rank's data files of a state, as what writes them and as their bytes, which they point to."""
    state, tensors = arrays(value), []
    chunks = rank_chunks(TABLE, NUM_LAYERS, layout, layout.coords(rank))
    pieces = [Piece(info.name, box, a, b, cut(state[info.name], box, a, b)) for info, box, a, b in chunks]
    plan = plan_save(pieces, TABLE)
    for file, rows in zip(plan.files, plan.rows, strict=True):
        content = np.frombuffer(file.header + b"".join(pieces[row].data.tobytes() for row in rows), np.uint8)
        draft = file.index(np.zeros(num_granules(file.size_bytes), np.uint64))
        blocks = [np.array([[content.ctypes.data, len(content)]], np.uint64)]
        tensors.append((PartSource(draft, blocks), content))
    return tensors


def save_rank(
    storage: Storage, seat: Seat, layout: ParallelLayout, value: int, *,
    patience_s: Callable[[float], float] = lambda _: -1.0, retries: Retries | None = None, awaits_commit: bool = True,
) -> Root | None:  # fmt: skip
    """Write one rank's files of a state, as its writer process would; rank 0 commits."""
    root = Root(seat.step, seat.attempt, layout, NUM_LAYERS, {info.name: info for info in TABLE}, (), {"value": value})
    sources = files(value, layout, seat.writer)  # held: of two threads that make them at once, one's are cached
    parts = [source for source, _ in sources]
    return write_step(
        StepTarget(storage, seat), parts, None if seat.writer else root, patience_s, retries,
        awaits_commit=awaits_commit,
    )  # fmt: skip


def save_ranks(storage: Storage, step: int, attempt: str, layout: ParallelLayout, value: int) -> None:
    """Save all ranks of a state one after the other; rank 0, the last one, commits."""
    for rank in reversed(range(layout.world_size)):
        seat = Seat(storage.address, step, attempt, rank, layout.world_size)
        save_rank(storage, seat, layout, value, awaits_commit=False)


def half_of(storage: Storage, step: int, root: Root | None = None) -> str:
    """What a committed step lacks of its state's bytes, empty where nothing."""
    root = root or read_root(storage, step)
    keys = {item.key for item in storage.list(f"{step_folder(step)}/")}
    expected = [
        content for rank in range(root.layout.world_size)
        for _, content in files(root.metadata["value"], root.layout, rank)
    ]  # fmt: skip
    for part, content in zip(root.parts, expected, strict=True):
        data, index = f"{step_folder(step)}/{part.data}", f"{step_folder(step)}/{part.index}"
        if not {data, index} <= keys:
            return f"{data} or its index is not there"
        if storage.read(data) != content.tobytes() or xxh3_64(storage.read(index)) != part.index_xxh3:
            return f"{data} holds other bytes"
    return ""


def restored_value(storage: Storage, step: int, layout: ParallelLayout) -> int:
    """The state that every rank of a layout restores, byte for byte; an AssertionError where it is none."""
    with CheckpointReader(storage, step) as reader:
        value = int(reader.root.metadata["value"])
        for rank in range(layout.world_size):
            chunks = rank_chunks(TABLE, NUM_LAYERS, layout, layout.coords(rank))
            pieces = [Piece(info.name, box, a, b, np.zeros(b - a, np.float32)) for info, box, a, b in chunks]
            restore_from(reader, pieces, tensors=TABLE)
            for piece in pieces:
                wanted = cut(arrays(value)[piece.name], piece.box, piece.start, piece.stop)
                require(piece.data.tobytes() == wanted.tobytes(), f"{piece.name} of step {step}")
    return value


def hash_of(storage: Storage, step: int) -> str:
    """The hash of all that a step holds."""
    with CheckpointReader(storage, step) as reader:
        return hash_checkpoint(reader, slab_bytes=1 << 20).all
