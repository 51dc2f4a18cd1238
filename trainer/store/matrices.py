"""Which matrices an update takes whole, which part of each a rank has, and who takes which: pure arithmetic.

A rank owns intervals of its own part of a parameter, which tp may cut. What travels is a span: a range of such a part
that is in one matrix. A parameter of experts has a matrix for each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit import Box


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in global terms: a parameter, or what one expert has of it."""

    name: str
    expert: int
    shape: tuple[int, int]

    @property
    def cost(self) -> int:
        """Return what a Newton-Schulz step of it costs, in multiplications: two products of it, one of its Gram."""
        least, most = sorted(self.shape)
        return 2 * most * least**2 + least**3


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A rectangle of a matrix: the one that ranks with the same place along tp hold."""

    matrix: Matrix
    corner: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class MatrixSpan:
    """The elements [start, stop) of a part, row by row; `first` is where they begin in a rank's part of the parameter.

    For example of two experts of 6 elements each, those from 4 to 9 of the parameter are the spans [4, 6) and [0, 3).
    """

    part: MatrixPart
    start: int
    stop: int
    first: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    @property
    def rectangles(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield what it is in its matrix, three at most: where each begins in the span, its rows and its columns.

        For example of rows of 4 the elements [2, 13) are the end of row 0, rows 1 and 2, and the begin of row 3.
        """
        (top, left), width, place = self.part.corner, self.part.shape[1], self.start
        while place < self.stop:
            row, column = divmod(place, width)
            num_rows = (self.stop - place) // width if column == 0 else 0
            end = width if num_rows else min(width, column + self.stop - place)
            rows = slice(top + row, top + row + max(num_rows, 1))
            yield place - self.start, rows, slice(left + column, left + end)
            place += num_rows * width or end - column


def spans_of(name: str, shape: Sequence[int], box: Box, start: int, stop: int) -> Iterator[MatrixSpan]:
    """Yield the spans of the elements [start, stop) of a rank's box of a parameter of a shape."""
    rows, columns = box.shape[-2:]
    size, whole, corner = rows * columns, (shape[-2], shape[-1]), (box.offset[-2], box.offset[-1])
    first_expert = box.offset[0] if len(shape) == 3 else 0
    for number in range(start // size, -(-stop // size)):
        low, high = max(start, number * size), min(stop, (number + 1) * size)
        part = MatrixPart(Matrix(name, first_expert + number, whole), corner, (rows, columns))
        yield MatrixSpan(part, low - number * size, high - number * size, low)


def shared_out(matrices: Sequence[Matrix], loads: list[int]) -> dict[Matrix, int]:
    """Return which rank takes each matrix: the dearest first, to the one with the least to do, which is counted.

    For example of costs 5, 4, 3 and 1, two ranks of loads [0, 0] take 5 and 1, and 4 and 3. Then loads are [6, 7].
    """
    takers = dict[Matrix, int]()
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        takers[matrix] = loads.index(min(loads))
        loads[takers[matrix]] += matrix.cost
    return takers


def in_rounds(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return names in rounds of at most so many elements; a larger one has a round of its own."""
    rounds, filled = list[list[str]](), most
    for name, size in sizes.items():
        if filled + size > most:
            rounds.append([])
            filled = 0
        rounds[-1].append(name)
        filled += size
    return rounds
