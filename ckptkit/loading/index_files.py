"""Index files of a step: each is read by one rank of those that open it together, some of them ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ckptkit.format.root import Part
from ckptkit.loading.exchange import Exchange, agreed

NUM_INDEX_THREADS, INDEX_GROUP = 8, 4  # threads that read index files, files that each reads one after the other
MAX_GROUP_BYTES = 16 << 20


def index_files(
    parts: Sequence[Part], exchange: Exchange, read: Callable[[Part], bytes], ranks_that_read: Callable[[int], range]
) -> Iterator[bytes]:
    """Yield the index files in the order of the parts; of those that can read one, by turns, one rank does."""
    rank, size = exchange.rank, exchange.size
    with ThreadPoolExecutor(NUM_INDEX_THREADS) as pool:

        def reader(number: int) -> int:
            ranks = ranks_that_read(number)
            return ranks[number % len(ranks)]

        def submit(group: range) -> Future[list[bytes]]:
            mine = [parts[number] for number in group if reader(number) == rank]
            return pool.submit(lambda: [read(part) for part in mine])

        groups = _groups(parts, INDEX_GROUP * size)
        ahead = deque(map(submit, groups[:NUM_INDEX_THREADS]))
        for turn, group in enumerate(groups):
            if turn + NUM_INDEX_THREADS < len(groups):
                ahead.append(submit(groups[turn + NUM_INDEX_THREADS]))
            reading = ahead.popleft()
            gathered = agreed(exchange, lambda: b"".join(reading.result()))  # noqa: B023  # called at once
            at = [0] * size
            for number in group:
                owner, num_bytes = reader(number), parts[number].index_bytes
                yield gathered[owner][at[owner] : at[owner] + num_bytes]
                at[owner] += num_bytes


def _groups(parts: Sequence[Part], most: int) -> list[range]:
    """Return the numbers of parts in their order, at most so many and MAX_GROUP_BYTES of index files at a time."""
    groups: list[range] = []
    room = 0
    for number, part in enumerate(parts):
        if not groups or len(groups[-1]) >= most or part.index_bytes > room:
            groups.append(range(number, number))
            room = MAX_GROUP_BYTES
        groups[-1] = range(groups[-1].start, number + 1)
        room -= part.index_bytes
    return groups
