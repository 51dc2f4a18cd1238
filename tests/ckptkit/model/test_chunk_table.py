"""Tables of chunks: many at once are made and refused as one by one."""

from collections.abc import Sequence

import numpy as np
import pytest

from ckptkit.model.chunk_table import ChunkTable, TensorColumns
from ckptkit.model.tensor import Box, Piece, Placement, TensorInfo
from threefold.errors import UserError

SHAPES = {"a": (4, 6), "b": (6,), "c": (), "d": (0, 3), "e": (4, 6)}
INFOS = {name: TensorInfo(name, "F32", shape, Placement(0)) for name, shape in SHAPES.items()}


def rows(table: ChunkTable) -> list[tuple[str, Box, int, int]]:
    numbers = zip(table.tensor.tolist(), table.start.tolist(), table.stop.tolist(), strict=True)
    return [(table.names[tensor], table.box(row), *ends) for row, (tensor, *ends) in enumerate(numbers)]


def piece(name: str, offset: Sequence[int], shape: Sequence[int], start: int = 0, stop: int = 1) -> Piece:
    return Piece(name, Box(tuple(offset), tuple(shape)), start, stop, np.zeros(1, np.float32))


@pytest.mark.parametrize("names", ["", "b", "c", "abcde", "ea"])
def test_whole_tensors_are_the_chunks_of_their_whole_boxes(names: str) -> None:
    infos = [INFOS[name] for name in names]
    wanted = [(info.name, Box((0,) * len(info.shape), info.shape), 0, info.numel) for info in infos]
    assert rows(ChunkTable.whole(TensorColumns.of(infos))) == wanted
    assert rows(ChunkTable.of([(INFOS[name], *rest) for name, *rest in wanted])) == wanted  # type: ignore[misc]


def test_pieces_make_a_table_in_their_order() -> None:
    pieces = [
        piece("e", (1, 2), (3, 4), 5, 12), piece("c", (), ()), piece("a", (1, 2), (3, 4)),
        piece("b", (5,), (1,)), piece("d", (0, 1), (0, 2), 0, 0), piece("e", (0, 0), (4, 6), 24, 24),
    ]  # fmt: skip
    table = ChunkTable.of_pieces(pieces, INFOS.values())
    assert rows(table) == [(each.name, each.box, each.start, each.stop) for each in pieces]
    assert table.names == tuple("ecabd")


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (piece("z", (0,), (1,)), "z: not in the table"),
        (piece("b", (0, 0), (1, 1)), r"b: box \(0, 0\)\+\(1, 1\) has other dims than shape \[6\]"),
        (piece("b", (0,), (1, 1)), "b: box .* has other dims"),
        (piece("a", (-1, 0), (1, 1)), "a: box .* leaves shape"),
        (piece("a", (0, 0), (-1, 1)), "a: box .* leaves shape"),
        (piece("a", (0, 3), (4, 4)), "a: box .* leaves shape"),
        (piece("a", (1 << 70, 0), (1, 1)), "a: box .* leaves shape"),
        (piece("a", (1 << 62, 0), (1 << 62, 1)), "a: box .* leaves shape"),
        (piece("a", (0, 0), (2, 2), 0, 5), r"a: range \[0, 5\) leaves its box of 4"),
        (piece("a", (0, 0), (2, 2), 3, 2), "a: range"),
        (piece("a", (0, 0), (2, 2), -1, 2), "a: range"),
    ],
)
def test_a_piece_that_does_not_fit_is_named_among_others(wrong: Piece, fault: str) -> None:
    sound = [piece("a", (0, 0), (4, 6)), piece("b", (0,), (6,))]
    assert ChunkTable.fitting(sound, INFOS) is not None
    for pieces in ([wrong, *sound], [*sound, wrong], [wrong, wrong]):
        assert ChunkTable.fitting(pieces, INFOS) is None
        with pytest.raises(UserError, match=fault) as raised:
            ChunkTable.of_pieces(pieces, INFOS.values())
        assert raised.value.message.count("\n") == pieces.count(wrong)


def test_boxes_of_more_elements_than_a_number_counts_are_taken() -> None:
    huge = TensorInfo("huge", "U8", (1 << 40, 1 << 40), Placement(0))
    whole = piece("huge", (0, 0), (1 << 40, 1 << 40))
    assert rows(ChunkTable.of_pieces([whole], [huge])) == [("huge", whole.box, 0, 1)]
