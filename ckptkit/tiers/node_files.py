"""NodeFiles: where the files of one step are on several nodes, whose ranks read it together.

Each file is read by the ranks of one node that holds it, on its own disk or in its replica, and what others want of it
goes to them through the exchange. So no rank looks at another node's folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptkit.format.keys import step_folder, writer_of
from ckptkit.format.root import Root
from ckptkit.loading.exchange import Exchange
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.sharing import Line, Runs
from ckptkit.plan.cover import Cover
from ckptkit.runs.run import Run
from threefold.storage import Storage


@dataclass(frozen=True, slots=True)
class NodeFile:
    """Where a file of a step is: on which node, by its number, for which ranks, and in which of the node's places."""

    node: int
    ranks: range
    place: int


class NodeFiles:
    """The places of a step that nodes hold together; all ranks of the exchange make the same calls.

    `root` names the files of all nodes, and `sources` where each of its parts is; `runs` are the places of this rank's
    node. `damaged` are the numbers of the parts that this rank could not read.
    """

    def __init__(
        self, url: str, root: Root, sources: Sequence[NodeFile], runs: Sequence[Run], exchange: Exchange
    ) -> None:  # fmt: skip
        self._folder = step_folder(root.step)
        self.url = f"{url}/{self._folder}"
        self.sources, self._root, self._runs, self._exchange = sources, root, runs, exchange
        self.damaged: set[int] = set()
        self._numbers = {key: number for number, part in enumerate(root.parts) for key in (part.data, part.index)}

    def open(self) -> CheckpointReader:
        """Return a reader of the step, for a `with`."""
        storage, step = self._runs[0].storage, self._root.step
        return CheckpointReader(storage, step, exchange=self._exchange, root=self._root, places=self)

    def ranks_that_read(self, number: int) -> range:
        """Return the ranks of the node that the files of a part are read on."""
        return self.sources[number].ranks

    def readable(self, line: Line) -> list[Runs] | None:
        """Return what each rank can read of the line of data files: what is read on its node."""
        files: dict[range, list[int]] = {}
        for number, source in enumerate(self.sources):
            files.setdefault(source.ranks, []).append(number)
        runs = {ranks: line.of_files(numbers) for ranks, numbers in files.items()}
        nothing = line.of_files([])
        return [
            next((found for ranks, found in runs.items() if rank in ranks), nothing)
            for rank in range(self._exchange.size)
        ]

    def storage_of(self, key: str) -> Storage:
        """Return where a file is that this rank reads."""
        return self._runs[self.sources[self._numbers[key]].place].storage

    def name_of(self, key: str) -> str:
        """Return the name of a file; of one on another node with the URL that all nodes have written."""
        is_here = self._exchange.rank in self.sources[self._numbers[key]].ranks
        return f"{self.storage_of(key).url}/{self._folder}/{key}" if is_here else f"{self.url}/{key}"

    def note_lost(self, key: str) -> None:
        """Take note of which part could not be read."""
        self.damaged.add(self._numbers[key])


def vouch(reader: CheckpointReader) -> None:
    """Put the certificate of all parts into a root, as the copy to one place does; all ranks call this.

    CheckFailed if the parts do not hold each element of each tensor exactly once.
    """
    files = reader.files
    files.keep_indexes()  # which go through the exchange once only
    parts = files.root.parts
    cover = Cover(list(files.root.tensors.values()))
    for part, index in zip(parts, files.read_indexes(), strict=True):
        cover.add(index, files.places.name_of(part.index))
    cover.check(
        files.url, lambda: ((writer_of(p.index), index) for p, index in zip(parts, files.read_indexes(), strict=True))
    )
    files.root = replace(files.root, certificate=cover.certificate)
