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
        """Return what a Newton-Schulz step of it costs, in multiplications of the larger products."""
        return self.shape[0] * self.shape[1] * min(self.shape)


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


def spans_of(name: str, shape: Sequence[int], box: Box, start: int, stop: int) -> Iterator[MatrixSpan]:
    """Yield the spans of the elements [start, stop) of a rank's box of a parameter of a shape."""
    rows, columns = box.shape[-2:]
    size, whole, corner = rows * columns, (shape[-2], shape[-1]), (box.offset[-2], box.offset[-1])
    first_expert = box.offset[0] if len(shape) == 3 else 0
    for number in range(start // size, -(-stop // size)):
        low, high = max(start, number * size), min(stop, (number + 1) * size)
        part = MatrixPart(Matrix(name, first_expert + number, whole), corner, (rows, columns))
        yield MatrixSpan(part, low - number * size, high - number * size, low)


def shared_out(matrices: Sequence[Matrix], num_ranks: int) -> dict[Matrix, int]:
    """Return which of some ranks takes each matrix: the dearest first, to the one with the least to do.

    For example of costs 5, 4, 3 and 1, two ranks take 5 and 1, and 4 and 3.
    """
    loads, takers = [0] * num_ranks, dict[Matrix, int]()
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
