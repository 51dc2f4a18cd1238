"""Which node each rank is on, where the first tier of a run is each node's own.

A node is what torchrun starts ranks on: those from RANK - LOCAL_RANK on. Its name is $THREEFOLD_NODE, else the host's;
a node that replaces another takes over its name. The peer of a node is the next one in the order of ranks, of the last
one the first.
"""

import json
import os
import socket

from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.tiers.tier import Node, node_name, nodes_of
from threefold.errors import UserError

LOCAL_RANK = "LOCAL_RANK"


def own_name(given: Node | None = None) -> str:
    """Return the name of this node: the given one's, $THREEFOLD_NODE, or the host's."""
    return node_name(os.environ, socket.gethostname()) if given is None else given.name


def nodes_here(exchange: Exchange, given: Node | None = None) -> list[Node]:
    """Return the node of each rank; all ranks call this. UserError on all where they do not fit together.

    `given` is what the caller says of this rank's node, None if that is as torchrun says.
    """

    def mine() -> bytes:
        return json.dumps([own_name(given), _first_rank(exchange) if given is None else given.first_writer]).encode()

    said = [json.loads(each) for each in agreed(exchange, mine)]
    return on_all(exchange, lambda: _fitting(said, exchange, given))


def _first_rank(exchange: Exchange) -> int:
    """Return the first rank of this node; of a process alone it is that one, whatever started it."""
    number = os.environ.get(LOCAL_RANK, "") if exchange.size > 1 else "0"
    if not number.isdecimal() or int(number) > exchange.rank:
        text = f"rank {exchange.rank} of {exchange.size} does not know which ranks its node has: {LOCAL_RANK}={number}"
        raise UserError(
            text, hint="start the program with torchrun, or pass CheckpointerOptions(node=ckptkit.Node(...))"
        )
    return exchange.rank - int(number)


def _fitting(said: list[tuple[str, int]], exchange: Exchange, given: Node | None) -> list[Node]:
    nodes = nodes_of([name for name, _ in said], [first for _, first in said])
    mine, name = nodes[exchange.rank], said[exchange.rank][0]
    if given is None and name != mine.name:
        text = f"rank {exchange.rank} is on node {name}, among the ranks of {mine.name}"
        raise UserError(text, hint="number the ranks node by node, as torchrun does")
    if given not in (None, mine):
        text = f"rank {exchange.rank} of {exchange.size} is on {given}, by what all ranks say it is on {mine}"
        raise UserError(text, hint=f"CheckpointerOptions(node=ckptkit.{mine})")
    return nodes
