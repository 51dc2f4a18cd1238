"""Steps of a first tier that is each node's own, found and read back by the ranks of the nodes that saved them.

A step counts when every node has its files of one attempt, for its present ranks and under the same layout: on its own
disk, or in the replica that its peer keeps.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit import NodePlaces, Root, Tiers, nodes_here
from threefold.errors import CheckFailed, UserError
from trainer.checkpoint.load import restore_step
from trainer.config import Config
from trainer.config.resolve import layout_of, shared_urls, tiers_of
from trainer.engine import Engine
from trainer.job.ranks import Ranks

MAX_STEPS = 8  # of each place so many are looked at, the newest


class NodeLocalSteps:
    """What the nodes of a run hold themselves; nothing if the first tier is one place for all.

    `url` is that tier as it is written (empty without it), `steps` the steps that all nodes can restore, newest first,
    each with its attempt; `shared_urls` are those of the other tiers.
    """

    def __init__(self, ranks: Ranks, config: Config, tiers: Tiers | None) -> None:
        """Look, on all ranks together."""
        self._ranks, self._config = ranks, config
        self.url = ""
        self._places: NodePlaces | None = None
        self.steps: dict[int, str] = {}
        self.shared_urls = shared_urls(tiers)
        if tiers is None or tiers.node is None:
            return
        self.url = tiers.first.url
        self._places = places = NodePlaces(tiers.own_urls, tiers.node, ranks.rank)
        held = ranks.gather(ranks.on_all(lambda: list(self._held(places).items())))
        self.steps = agreed_steps([dict(each) for each in held])

    def restore(self, engine: Engine, step: int) -> Root:
        """Read one step into the engine, from this node's disk or else from the replica; CheckFailed if neither is
        sound.
        """
        damage: CheckFailed | None = None
        runs = self._places.runs if self._places else []
        for run in runs:
            try:
                if run.is_committed(step) and run.root(step).attempt == self.steps[step]:
                    return restore_step(engine, run, step)
            except CheckFailed as error:
                damage = damage or error
        raise damage or CheckFailed(f"step {step} is gone from {' and '.join(run.url for run in runs)}")

    def quarantine_after(self, step: int) -> None:
        """Quarantine steps after the one that all ranks are at: not all nodes have them, or they are damaged."""
        if (places := self._places) is None:
            return
        if steps := self._ranks.on_all(lambda: places.quarantine_after(step, self._ranks.exchange)):
            listed = ", ".join(map(str, steps))
            self._ranks.say(f"steps {listed} of {self.url} are not sound on all nodes under this layout: set aside")

    def _held(self, places: NodePlaces) -> dict[int, str]:
        node, held = places.node, dict[int, str]()
        writers = (node.first_writer, node.num_local, node.num_writers)
        for run, step in places.committed(MAX_STEPS):
            try:
                root = run.root(step)
            except CheckFailed:
                continue
            share = root.share and (root.share.first, root.share.count, root.share.of)
            parallel = root.metadata.get("config", {}).get("parallel", {})
            is_same = ownership(parallel) == ownership(dataclasses.asdict(self._config.parallel))
            if share == writers and root.layout == layout_of(self._config) and is_same:
                held.setdefault(step, root.attempt)
        return held


def ownership(parallel: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what else than the layout decides which rank owns what, of a table `[parallel]`."""
    dp_shard = parallel.get("dp_shard", 0)
    nested = (dp_shard, parallel.get("zero_whole_kib")) if dp_shard else ()  # what is whole has no replicas
    return parallel.get("pipeline_layout", "even"), parallel.get("bucket_mib", 64), *nested


def agreed_steps(held: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """Return, newest first, the steps that each of several nodes holds of one attempt, and that attempt."""
    common = set.intersection(*(set(steps.items()) for steps in held)) if held else set()
    return dict(sorted(common, reverse=True))


def tiers_here(ranks: Ranks, config: Config) -> Tiers | None:
    """Return where the run saves to, None for nowhere; each node's own tier as this rank's node. All ranks call it."""
    tiers = ranks.on_all(lambda: tiers_of(config))
    if tiers is None or not tiers.first.of_node:
        return tiers
    ranks.on_all(lambda: _check_groups(config))
    nodes = ranks.on_all(lambda: nodes_here(ranks.exchange))
    return dataclasses.replace(tiers, node=nodes[ranks.rank])


def _check_groups(config: Config) -> None:
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local % config.parallel.tp:
        raise UserError(
            f"a first tier of each node's own needs tensor-parallel groups within a node: {num_local} ranks are on "
            f"this one, tp is {config.parallel.tp}",
            hint="choose --tp so that it divides the ranks of a node",
        )
