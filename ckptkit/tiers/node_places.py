"""NodePlaces: where one node of a run keeps its own files, on its disk and with its peer; and which node a rank is on.

A node is what torchrun starts ranks on: those from RANK - LOCAL_RANK on. Its name is $THREEFOLD_NODE, else the host's;
a node that replaces another takes over its name. The peer of a node is the next one in the order of ranks, of the last
one the first.
"""

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ckptkit.format.root import Root
from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.loading.roots import root_info, step_folders, stored_root
from ckptkit.runs.run import Run
from ckptkit.tiers.tier import Node, node_name, nodes_of
from threefold.cli import log
from threefold.errors import CheckFailed, StorageError, UserError

LOCAL_RANK = "LOCAL_RANK"
T = TypeVar("T")


class NodePlaces:
    """The runs of a node, its own disk first, then the replica if it has one, as one of its ranks sees them.

    The first rank of a node leads: it alone changes something, and says what is wrong. A replica that cannot be reached
    is left out from then on, as its peer may be lost.
    """

    def __init__(self, urls: Sequence[str], node: Node, rank: int) -> None:
        self.node, self.leads = node, rank == node.first_writer
        self.runs = [Run(url) for url in urls]
        self._left_out: set[int] = set()

    def listed(self) -> set[int]:
        """Return the steps that have a folder in one of the places, committed or not."""
        return {step for _, step in self._found(lambda run: step_folders(run.storage))}

    def roots(self, step: int) -> dict[int, Root | CheckFailed]:
        """Return the root of a step in each place that has one, by the place's number, or why it cannot be read."""
        return dict(self._found(lambda run: _roots(run, step)))

    def committed(self, most: int | None = None) -> Iterator[tuple[Run, int]]:
        """Return the committed steps of each place, newest first, of each at most so many."""
        found = self._found(lambda run: itertools.islice(run.newest_first(), most))
        return ((self.runs[number], step) for number, step in found)

    def quarantine(self, *steps: int) -> list[int]:
        """Quarantine steps in the node's places, if this rank leads, and return those that were there."""
        found = [(run, step) for run, step in self.committed() if step in steps] if self.leads else []
        return [step for run, step in found if _is_quarantined(run, step)]

    def quarantine_after(self, step: int, exchange: Exchange) -> list[int]:
        """Quarantine the steps after one in the places of all nodes, and return them; all ranks call this."""

        def act() -> bytes:
            newer = {each for _, each in self.committed() if each > step} if self.leads else ()
            return " ".join(map(str, self.quarantine(*newer))).encode()

        return sorted({int(each) for heard in agreed(exchange, act) for each in heard.split()})

    def check_apart(self, token: str, names: Iterable[str], exchange: Exchange) -> None:
        """Raise UserError on all ranks if two nodes have one place, by marks that each leaves in its own meanwhile.

        `token` is a name that no other start has.
        """
        storage, mark = self.runs[0].storage, _mark(token, self.node.name)
        on_all(exchange, lambda: storage.write(mark, b"") if self.leads else None)
        try:
            on_all(exchange, lambda: self._check_marks(token, names))
        finally:
            on_all(exchange, lambda: storage.delete([mark]) if self.leads else None)

    def _check_marks(self, token: str, names: Iterable[str]) -> None:
        run = self.runs[0]
        for name in names if self.leads else ():
            if name != self.node.name and run.storage.info(_mark(token, name)) is not None:
                raise UserError(
                    f"{run.url} is one folder of the nodes {self.node.name} and {name}, and is to be each one's own",
                    hint="a disk of the node; of a place that all nodes share leave {node} out",
                )

    def _found(self, find: Callable[[Run], Iterable[T]]) -> Iterator[tuple[int, T]]:
        """Yield what is found in each place with the place's number; nothing of a replica that cannot be reached."""
        for number, run in enumerate(self.runs):
            try:
                yield from ((number, item) for item in (find(run) if number not in self._left_out else ()))
            except StorageError as error:
                if not number:
                    raise
                self._left_out.add(number)
                if self.leads:
                    log(f"warning: the replica is left out: {error}")


def _roots(run: Run, step: int) -> list[Root | CheckFailed]:
    """Return a step's root, or why it cannot be read; nothing where there is none."""
    if (info := root_info(run.storage, step)) is None:
        return []
    try:
        return [stored_root(run.storage, step, info)[1]]
    except CheckFailed as damage:
        return [damage]


def _is_quarantined(run: Run, step: int) -> bool:
    """Quarantine a step; where that cannot be, as where nothing may be written, say so."""
    try:
        return run.quarantine(step)
    except (UserError, OSError) as error:
        log(f"warning: step {step} of {run.url} cannot be set aside: {error}")
        return False


def _mark(token: str, name: str) -> str:
    """Return the key of the mark of a node."""
    return f"{token}.of-{name}"


def own_name(node: Node | None = None) -> str:
    """Return the name of this node: the given one's, $THREEFOLD_NODE, or the host's."""
    return node_name(os.environ, socket.gethostname()) if node is None else node.name


def nodes_here(exchange: Exchange, node: Node | None = None) -> list[Node]:
    """Return the node of each rank; all ranks call this. UserError on all where they do not fit together.

    `node` is what the caller says of this rank's node, None if that is as torchrun says.
    """

    def describe() -> bytes:
        return json.dumps([own_name(node), _first_rank(exchange) if node is None else node.first_writer]).encode()

    said = [json.loads(each) for each in agreed(exchange, describe)]
    return on_all(exchange, lambda: _fitting(said, exchange, node))


def _first_rank(exchange: Exchange) -> int:
    """Return the first rank of this node; of a process alone it is that one, whatever started it."""
    number = os.environ.get(LOCAL_RANK, "") if exchange.size > 1 else "0"
    if not number.isdecimal() or int(number) > exchange.rank:
        raise UserError(
            f"rank {exchange.rank} of {exchange.size} does not know which ranks its node has: {LOCAL_RANK}={number}",
            hint="start the program with torchrun, or pass CheckpointerOptions(node=ckptkit.Node(...))",
        )
    return exchange.rank - int(number)


def _fitting(described: list[tuple[str, int]], exchange: Exchange, node: Node | None) -> list[Node]:
    nodes = nodes_of([name for name, _ in described], [first for _, first in described])
    own, name = nodes[exchange.rank], described[exchange.rank][0]
    if node is None and name != own.name:
        raise UserError(
            f"rank {exchange.rank} is on node {name}, among the ranks of {own.name}",
            hint="number the ranks node by node, as torchrun does",
        )
    if node not in (None, own):
        raise UserError(
            f"rank {exchange.rank} of {exchange.size} is on {node}, by what all ranks say it is on {own}",
            hint=f"CheckpointerOptions(node=ckptkit.{own})",
        )
    return nodes
