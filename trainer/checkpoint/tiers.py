"""Where a run saves to, for the node that this rank is on, if the first tier is each node's own."""

import dataclasses
import os

from ckptkit import Tiers, nodes_here
from threefold.errors import UserError
from trainer.config import Config
from trainer.config.resolve import tiers_of
from trainer.job.ranks import Ranks


def tiers_here(ranks: Ranks, config: Config) -> Tiers | None:
    """Return where the run saves to, None for nowhere; each node's own tier as this rank's node. All ranks call it."""
    tiers = ranks.on_all(lambda: tiers_of(config))
    if tiers is None or not tiers.first.of_node:
        return tiers
    ranks.on_all(lambda: _check_groups(config))
    nodes = ranks.on_all(lambda: nodes_here(ranks.exchange))
    return dataclasses.replace(tiers, node=nodes[ranks.rank])


def _check_groups(config: Config) -> None:
    """Raise UserError if ranks of other nodes hold what this node's ranks share."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local % config.parallel.tp:
        raise UserError(
            f"a first tier of each node's own needs tensor-parallel groups within a node: {num_local} ranks are on "
            f"this one, tp is {config.parallel.tp}",
            hint="choose --tp so that it divides the ranks of a node",
        )
