"""Where a run saves to, for the node that this rank is on, if the first tier is each node's own.

A node is what torchrun starts ranks on: those from RANK - LOCAL_RANK on, LOCAL_WORLD_SIZE of them. Its name is
$THREEFOLD_NODE, else the host's; a node that replaces another takes over its name. The peer of a node is the next one
in the order of ranks, of the last one the first.
"""

import dataclasses
import os
import socket

from ckptkit import Tiers, node_name, nodes_of
from threefold.errors import UserError
from trainer.config import Config
from trainer.config.resolve import tiers_of
from trainer.job.ranks import Ranks


def tiers_here(ranks: Ranks, config: Config) -> Tiers | None:
    """Return where the run saves to, None for nowhere; each node's own tier as this rank's node. All ranks call it."""
    tiers = ranks.on_all(lambda: tiers_of(config))
    if tiers is None or not tiers.first.of_node:
        return tiers
    mine = ranks.on_all(lambda: (node_name(os.environ, socket.gethostname()), _first_rank(ranks, config)))
    found = ranks.gather(mine)
    nodes = ranks.on_all(lambda: nodes_of([name for name, _ in found], [first for _, first in found]))
    return dataclasses.replace(tiers, node=nodes[ranks.rank])


def _first_rank(ranks: Ranks, config: Config) -> int:
    """Return the first rank of this node; UserError if ranks of other nodes hold what its ranks share."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local % config.parallel.tp:
        raise UserError(
            f"a first tier of each node's own needs tensor-parallel groups within a node: {num_local} ranks are on "
            f"this one, tp is {config.parallel.tp}",
            hint="choose --tp so that it divides the ranks of a node",
        )
    return ranks.rank - int(os.environ.get("LOCAL_RANK", "0"))
