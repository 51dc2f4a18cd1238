"""NodeReader: one step whose files are on several nodes, read by all ranks together.

Each file is read by the ranks of one node that holds it, on its own disk or in its replica, and what others want of it
goes to them through the exchange. So no rank looks at another node's folder.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckptkit.format.keys import writer_of
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part, Root
from ckptkit.loading.exchange import Exchange
from ckptkit.loading.index_files import MAX_GROUP_BYTES
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.sharing import Line, Runs
from ckptkit.plan.cover import Cover
from ckptkit.runs.run import Run
from threefold.errors import CheckFailed
from threefold.storage import Storage


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file of a step is: on which node, by its number, for which ranks, and in which of the node's places."""

    node: int
    ranks: range
    place: int


class NodeReader(CheckpointReader):
    """A step that nodes hold together; all ranks of the exchange make the same calls.

    `root` names the files of all nodes, and `sources` where each of its parts is; `runs` are the places of this rank's
    node. `damaged` are the numbers of the parts that this rank could not read.
    """

    def __init__(
        self, url: str, root: Root, sources: Sequence[Source], runs: Sequence[Run], exchange: Exchange
    ) -> None:  # fmt: skip
        super().__init__(runs[0].storage, root.step, exchange=exchange, root=root)
        self.url = f"{url}/{self.folder}"
        self.sources, self._runs = sources, runs
        self.damaged: set[int] = set()
        self._indexes: list[PartIndex] = []
        self._numbers = {key: number for number, part in enumerate(root.parts) for key in (part.data, part.index)}

    def vouch(self) -> None:
        """Put the certificate of all parts into the root, as the copy to one place does; all ranks call this.

        CheckFailed if the parts do not hold each element of each tensor exactly once.
        """
        cover = Cover(list(self.root.tensors.values()))
        for part, index in zip(self.root.parts, self.read_indexes(), strict=True):
            cover.add(index, self.name_of(part.index))
        cover.check(
            self.url,
            lambda: (
                (writer_of(p.index), index) for p, index in zip(self.root.parts, self.read_indexes(), strict=True)
            ),
        )
        self.root = replace(self.root, certificate=cover.certificate)

    def read_indexes(self) -> Iterator[PartIndex]:
        """Yield all part indexes; few bytes of them go through the exchange once only."""
        if sum(part.index_bytes for part in self.root.parts) > MAX_GROUP_BYTES:
            return super().read_indexes()
        self._indexes = self._indexes or list(super().read_indexes())
        return iter(self._indexes)

    def ranks_that_read(self, number: int) -> range:
        """Return the ranks of the node that the files of a part are read on."""
        return self.sources[number].ranks

    def readable(self, line: Line) -> list[Runs]:
        """Return what each rank can read of the line of data files: what is read on its node."""
        files: dict[range, list[int]] = {}
        for number, source in enumerate(self.sources):
            files.setdefault(source.ranks, []).append(number)
        runs = {ranks: line.of_files(numbers) for ranks, numbers in files.items()}
        nothing = line.of_files([])
        return [
            next((found for ranks, found in runs.items() if rank in ranks), nothing)
            for rank in range(self.exchange.size)
        ]

    def storage_of(self, key: str) -> Storage:
        """Return where a file is that this rank reads."""
        return self._runs[self.sources[self._numbers[key]].place].storage

    def name_of(self, key: str) -> str:
        """Return the name of a file; of one on another node with the URL that all nodes have written."""
        is_here = self.exchange.rank in self.sources[self._numbers[key]].ranks
        return f"{self.storage_of(key).url}/{self.folder}/{key}" if is_here else f"{self.url}/{key}"

    @contextmanager
    def loss_as_damage(self, key: str, num_bytes: int, part: Part | None = None) -> Iterator[None]:
        """Note which part could not be read."""
        try:
            with super().loss_as_damage(key, num_bytes, part):
                yield
        except CheckFailed:
            self.damaged.add(self._numbers[key])
            raise
