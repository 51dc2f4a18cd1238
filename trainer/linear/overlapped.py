"""Products beside the transfers of their tokens, which are gathered before or summed after, in parts.

A part is some rows of every rank. The transfer of one part runs on the group's own stream beside the product of
another. All gathers begin at once, and the rows that this rank has itself are multiplied first. Each sum begins after
its part's product. Which rows are multiplied together changes no sum of a row; its bits change only if a library has
another kernel for so few rows, as MKL has below 8. Source: Wang and others 2023 (Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from trainer.mesh.group import Group, Work

Product = Callable[[Tensor, Tensor], object]  # write the product of some rows into others


@dataclass(frozen=True, slots=True)
class TokenCut:
    """A group of ranks with T rows each, S in all, the first rank's first; in how many parts they are transferred.

    For example 2 ranks with 4 rows each and 2 parts: the first part is rows 0, 1, 4 and 5 of all, the second the rest.
    """

    group: Group
    num_parts: int = 1

    def rows(self, index: int, part: slice, num_rows: int) -> slice:
        """Return where a part of the rows of the rank at place `index` is among those of all."""
        return slice(index * num_rows + part.start, index * num_rows + part.stop)

    def multiply_gathered(self, own_TK: Tensor, out_SN: Tensor, product: Product) -> None:
        """Write the product of the rows of all ranks."""
        if self.num_parts == 1:
            product(self.group.start_gather(own_TK).wait(), out_SN)
            return
        parts = parts_of(own_TK.shape[0], self.num_parts)
        gathers = [self.group.start_gather(own_TK[part]) for part in parts]
        product(own_TK, self.group.share(out_SN))
        for part, gather in zip(parts, gathers, strict=True):
            for index, rows in enumerate(gather.wait().chunk(self.group.size)):
                if index != self.group.index:
                    product(rows, out_SN[self.rows(index, part, own_TK.shape[0])])

    def multiply_and_gather(self, own_TN: Tensor, out_SK: Tensor, product: Product) -> Tensor:
        """Write the product of the rows of all ranks, and return those rows, [S, N], which travel as one part."""
        gather = self.group.start_gather(own_TN)
        if self.num_parts == 1:
            all_SN = gather.wait()
            product(all_SN, out_SK)
            return all_SN
        first, num_rows = self.group.index * own_TN.shape[0], own_TN.shape[0]
        product(own_TN, self.group.share(out_SK))
        all_SN = gather.wait()
        for others in (slice(0, first), slice(first + num_rows, all_SN.shape[0])):
            if others.start < others.stop:
                product(all_SN[others], out_SK[others])
        return all_SN

    def start_sum(self, all_SK: Tensor, num_columns: int, product: Product) -> "Sums":
        """Begin to sum the products of the ranks, of which each keeps its own rows, [T, num_columns]."""
        num_rows = all_SK.shape[0] // self.group.size
        out_TN = all_SK.new_empty(num_rows, num_columns)
        works = []
        for part in parts_of(num_rows, self.num_parts):
            wide = all_SK.new_empty(self.group.size * (part.stop - part.start), num_columns)
            if self.num_parts == 1:
                product(all_SK, wide)
            else:
                for index, rows in enumerate(wide.chunk(self.group.size)):
                    product(all_SK[self.rows(index, part, num_rows)], rows)
            works.append(self.group.start_scatter(wide, out_TN[part]))
        return Sums(out_TN, works)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums under way."""

    out_TN: Tensor
    works: Sequence[Work]

    def wait(self) -> Tensor:
        """Wait for all of them, and return this rank's rows; on CUDA the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.out_TN


def parts_of(num_rows: int, num_parts: int) -> list[slice]:
    """Return runs of rows that are as equal as can be, none of them empty: 7 rows in 3 parts are 0-1, 2-3 and 4-6."""
    num_parts = min(num_parts, num_rows)
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
