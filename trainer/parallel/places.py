"""Places: which tokens of the training stream a rank has, as runs of numbers, whatever cuts them.

Token t of sample n has place n * length + t. A rank's tokens lie in memory in the order of its runs.
"""

from collections.abc import Iterator

Runs = tuple[range, ...]


def share_of(runs: Runs, index: int, num_shares: int) -> Runs:
    """Return one of equal shares of the places of some runs, in their order.

    >>> share_of((range(0, 4), range(12, 16)), 1, 4), share_of((range(3), range(6, 9)), 0, 1)
    ((range(2, 4),), (range(0, 3), range(6, 9)))
    """
    size = sum(map(len, runs)) // num_shares
    start, found = index * size, []
    for run in runs:
        found.append(run[max(start, 0) : max(start + size, 0)])
        start -= len(run)
    return tuple(part for part in found if part)


def halves_of(run: range, length: int, index: int, num_ranks: int) -> Runs:
    """Return one rank's places of rows of `length`: of twice as many chunks as ranks, the same from both ends.

    All ranks then have as much to see before their tokens. The first chunks of all rows come before the second ones.

    >>> halves_of(range(16), 8, 1, 2)
    (range(2, 4), range(10, 12), range(4, 6), range(12, 14))
    """
    size = length // (2 * num_ranks)
    chunks = (range(start, start + size) for start in (index * size, (2 * num_ranks - 1 - index) * size))
    return tuple(run[row + chunk.start : row + chunk.stop] for chunk in chunks for row in range(0, len(run), length))


def rows_of(places: range, runs: Runs) -> range:
    """Return in which rows of a tensor of the tokens of some runs one run's part is.

    >>> rows_of(range(13, 15), (range(0, 4), range(12, 16)))
    range(5, 7)
    """
    first = 0
    for run in runs:
        if places[0] in run and places[-1] in run:
            return range(first + places[0] - run[0], first + places[-1] - run[0] + 1)
        first += len(run)
    raise AssertionError(f"{places} is not within one of {runs}")


def boxes(runs: Runs, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of places as boxes of rows of `length` tokens: the first row, the place in it, the number of tokens.

    >>> list(boxes((range(2, 15), range(20, 22)), 4))
    [(0, 2, 2), (1, 0, 8), (3, 0, 3), (5, 0, 2)]
    """
    for run in runs:
        first, stop = run.start, run.stop
        while first < stop:
            row, position = divmod(first, length)
            whole = (stop - first) // length * length
            size = whole if not position and whole else min(length - position, stop - first)
            yield row, position, size
            first += size
