"""NodeSteps: what the nodes of a run hold together, where each keeps the files of its own ranks.

A step is whole when the roots that the nodes that are there hold of one attempt, on their own disks or in replicas,
name the files of all its writers. It need not be the nodes that saved it, nor as many ranks: what there is, is one
step for all, and each file is read where it is.

Its NodeFiles say where: each file is read by the ranks of one node that holds it, on its own disk or in its replica,
and what others want of it goes to them through the exchange. So no rank looks at another node's folder.
"""

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from ckptkit.format.keys import named_writers, step_folder, writer_of
from ckptkit.format.root import Part, Root, Share
from ckptkit.io.blocks import xxh3_64
from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.sharing import Line, Runs
from ckptkit.plan.cover import Cover
from ckptkit.runs.run import Run
from ckptkit.tiers.node_places import NodePlaces
from ckptkit.tiers.tier import Node
from threefold.cli import log
from threefold.errors import CheckFailed
from threefold.storage import Storage

T = TypeVar("T")
Copy = tuple[int, int, int]  # of a file: the number of its part, the node and the place
ALONE = Share(0, 1, 1)  # a root without a share names all files
HINT = "start the missing nodes again, under their names, or load from a slower tier, which holds whole steps"


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


@dataclass(frozen=True, slots=True)
class NodeRoot:
    """A step's root in one place of a node: which writers' files it names, and a digest of what all nodes' roots say.

    `fault` is why it cannot be read, empty if it can.
    """

    node: int
    place: int
    attempt: str = ""
    first: int = 0
    count: int = 0
    of: int = 0
    digest: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _SeenStep:
    """What was seen of a step: on all nodes, and the roots of this one by their place."""

    step: int
    holdings: list[NodeRoot]
    roots: dict[int, Root]


class NodeSteps:
    """The steps of a run on its nodes; all ranks make the same calls. `url` is what all of them have written."""

    def __init__(self, url: str, places: NodePlaces, nodes: Sequence[Node], exchange: Exchange) -> None:
        """Take the places of this rank's node, and the node of each rank."""
        self.url, self.places, self._exchange = url, places, exchange
        self._nodes = list(dict.fromkeys(nodes))
        self._own = self._nodes.index(places.node)
        self._seen: _SeenStep | None = None
        self._holders: list[list[NodeRoot]] = []  # of each part of the step that was opened last

    def candidates(self, only: int | None = None) -> Iterator[int]:
        """Yield the steps that any node holds a root of, newest first; with a step only that one."""
        self._seen = None  # a step may have been saved since, or set aside
        listed = [only] if only is not None else self._listed()
        return (step for step in listed if self._look(step))

    def whole(self, only: int | None = None) -> Iterator[int]:
        """Yield the steps that are whole, newest first."""
        return (step for step in self.candidates(only) if put_together(self._look(step))[0])

    def read(self, step: int, work: Callable[[CheckpointReader], T]) -> T:
        """Return what `work` does with a step; a file that it finds damaged is read from the next place that has it.

        CheckFailed if the step is not whole, or damaged wherever it is.
        """
        lost: set[Copy] = set()
        while True:
            files = self._located(step, lost)
            with files.open() as reader:
                try:
                    vouch(reader)
                    return work(reader)
                except CheckFailed as damage:
                    if not self._has_other_copies(files, lost):
                        raise
                    self._say(f"{' '.join(damage.message.split())}; another copy of it is read")

    def set_aside_after(self, step: int) -> None:
        """Set what is newer than a step aside on all nodes: none of it was sound."""
        if gone := self.places.quarantine_after(step, self._exchange):
            listed = ", ".join(map(str, gone))
            self._say(f"steps {listed} of {self.url} are not sound on all nodes: set aside, and can be saved again")

    def set_aside_broken(self, step: int) -> None:
        """Set steps from one on aside that are not whole: nobody can load them, and they are in the way of saves."""
        for each in itertools.takewhile(lambda each: each >= step, self.candidates()):
            if why := put_together(self._look(each))[1]:
                on_all(self._exchange, lambda: self.places.quarantine(each))  # noqa: B023  # called at once
                self._say(f"step {each} of {self.url} is not whole: {why}; it is set aside, and can be saved again")

    def check_apart(self, token: str) -> None:
        """UserError on all ranks if two nodes save to one place; `token` is a name that no other start has."""
        self.places.check_apart(token, [node.name for node in self._nodes], self._exchange)

    def _say(self, text: str) -> None:
        if self._exchange.rank == 0:
            log(text)

    def _has_other_copies(self, files: NodeFiles, lost: set[Copy]) -> bool:
        """Add what was found damaged on any rank to what is lost; return whether all of it is elsewhere too."""
        heard = agreed(self._exchange, lambda: json.dumps(sorted(files.damaged)).encode())
        damaged = {number for each in heard for number in json.loads(each)}
        lost |= {(number, files.sources[number].node, files.sources[number].place) for number in damaged}
        return bool(damaged) and all(
            any((number, each.node, each.place) not in lost for each in self._holders[number]) for number in damaged
        )

    def _listed(self) -> list[int]:
        """Return the steps that have a folder on any node, newest first."""
        here = agreed(
            self._exchange, lambda: json.dumps(sorted(self.places.listed()) if self.places.leads else []).encode()
        )
        return sorted({step for each in here for step in json.loads(each)}, reverse=True)

    def _look(self, step: int) -> list[NodeRoot]:
        """Return what all nodes hold of a step."""
        if self._seen is None or self._seen.step != step:
            roots = dict[int, Root]()
            heard = agreed(self._exchange, lambda: self._described(step, roots))
            holdings = [NodeRoot(*row) for each in heard for row in json.loads(each)]
            self._seen = _SeenStep(step, sorted(holdings, key=lambda each: each.place), roots)
        return self._seen.holdings

    def _described(self, step: int, roots: dict[int, Root]) -> bytes:
        """Return what this rank's node holds of a step, if the rank leads; the roots go into `roots`."""
        rows = []
        for place, root in self.places.roots(step).items() if self.places.leads else ():
            if isinstance(root, CheckFailed):
                rows.append(NodeRoot(self._own, place, fault=root.message))
            else:
                roots[place], share = root, root.share or ALONE
                digest = xxh3_64(_common(root).to_bytes())
                rows.append(NodeRoot(self._own, place, root.attempt, share.first, share.count, share.of, digest))
        return json.dumps([astuple(row) for row in rows]).encode()

    def _located(self, step: int, lost: set[Copy]) -> NodeFiles:
        """Return where the files of a step are, without those copies that are lost."""
        shares, why = put_together(self._look(step))
        if why:
            raise CheckFailed(f"step {step} of {self.url} is not whole: {why}", hint=HINT)
        assert self._seen is not None, "looked at"
        roots = self._seen.roots
        own_roots = {
            number: roots[holders[0].place]
            for number, holders in enumerate(shares)
            if self.places.leads and holders[0].node == self._own
        }
        head = _sent_by_one(self._exchange, _common(own_roots[0]).to_bytes() if 0 in own_roots else b"")
        parts = {number: [astuple(part) for part in root.parts] for number, root in own_roots.items()}
        heard = [json.loads(each) for each in agreed(self._exchange, lambda: json.dumps(parts).encode())]
        rows = {int(number): found for each in heard for number, found in each.items()}
        root = Root.from_bytes(head, f"{self.url}/{step_folder(step)}")
        root = replace(root, parts=tuple(Part(*row) for number in range(len(shares)) for row in rows[number]))
        self._holders = [holders for number, holders in enumerate(shares) for _ in rows[number]]
        sources = [
            next(self._source(each) for each in holders if (number, each.node, each.place) not in lost)
            for number, holders in enumerate(self._holders)
        ]
        return NodeFiles(self.url, root, sources, self.places.runs, self._exchange)

    def _source(self, holder: NodeRoot) -> NodeFile:
        node = self._nodes[holder.node]
        return NodeFile(holder.node, range(node.first_writer, node.first_writer + node.num_local), holder.place)


def put_together(holdings: Sequence[NodeRoot]) -> tuple[list[list[NodeRoot]], str]:
    """Return who holds each share of a step, in the order of the writers, and why the step is not whole, else ""."""
    faults = [each.fault for each in holdings if each.fault]
    why = faults[0] if faults else "no node has a root"
    for attempt, of in dict.fromkeys((each.attempt, each.of) for each in holdings if not each.fault):
        shares: dict[tuple[int, int], list[NodeRoot]] = {}
        for each in holdings:
            if (each.attempt, each.of) == (attempt, of):
                shares.setdefault((each.first, each.count), []).append(each)
        named = Counter(writer for first, count in shares for writer in range(first, first + count))
        if missing := set(range(of)) - named.keys():
            lacks = f"no node that is here has the files of {named_writers(missing)} of {of}"
            why = f"{lacks}; {faults[0]}" if faults else lacks
        elif max(named.values()) > 1:
            why = "its roots name files of one writer twice"
        elif len({each.digest for found in shares.values() for each in found}) > 1:
            why = "its roots differ from node to node"
        else:
            return [shares[share] for share in sorted(shares)], ""
    return [], why


def _common(root: Root) -> Root:
    """Return what the roots of all nodes say of a step."""
    return replace(root, parts=(), share=None, saved=None, certificate=None)


def _sent_by_one(exchange: Exchange, data: bytes) -> bytes:
    """Return on all ranks what one of them has."""
    [sent] = filter(None, agreed(exchange, lambda: zlib.compress(data, 1) if data else b""))
    return zlib.decompress(sent)
