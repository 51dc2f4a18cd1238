"""Steps of a first tier that is each node's own, found and read back by the ranks of the nodes that saved them.

A step counts when every node has its files of one and the same attempt, for the ranks that it has now and under the
same layout: on its own disk, or in the replica that its peer keeps.
"""

import itertools
from collections.abc import Iterator

from ckptkit.format.keys import DAMAGED_ROOT_KEY, ROOT_KEY, step_folder
from ckptkit.format.root import Root, Share
from ckptkit.loading.roots import is_medium_error, newest_first, read_root
from ckptkit.tiers.tier import Node, Tiers, agreed_steps, filled
from threefold.cli import log
from threefold.errors import CheckFailed, StorageError
from threefold.storage import open_storage
from trainer.config import Config
from trainer.config_check import layout_of
from trainer.engine import Engine
from trainer.node import find_node
from trainer.ranks import Ranks
from trainer.restoring import restore_step

MAX_STEPS = 8  # of each place so many are looked at, the newest


class OwnSteps:
    """What the nodes of a run hold themselves; nothing where the first tier is one place for all.

    `url` is that tier as it is written (empty without it), `steps` the steps that all nodes can restore, newest first,
    each with its attempt.
    """

    def __init__(self, ranks: Ranks, config: Config, tiers: Tiers | None) -> None:
        """Look, on all ranks together."""
        self._ranks, self._config = ranks, config
        self.url, self._places = "", list[str]()
        self.steps: dict[int, str] = {}
        node = find_node(ranks, config)
        if tiers is None or node is None:
            return
        self.url = tiers.first.url
        self._is_leader = ranks.rank == node.first_writer
        self._places = [filled(url, node) for url in (tiers.first.url, tiers.replica) if url]
        self.steps = agreed_steps(ranks.gather(ranks.together(lambda: self._held(node))))

    def restore(self, engine: Engine, step: int) -> Root:
        """Read one step into the engine, from this node's disk or else from the replica; CheckFailed where neither is
        sound."""
        damage: CheckFailed | None = None
        for url in self._places:
            storage = open_storage(url)
            try:
                found = storage.info(f"{step_folder(step)}/{ROOT_KEY}")
                if found is not None and read_root(storage, step).attempt == self.steps[step]:
                    return restore_step(engine, storage, step)
            except CheckFailed as error:
                damage = damage or error
        raise damage or CheckFailed(f"step {step} is gone from {' and '.join(self._places)}")

    def set_aside_after(self, step: int) -> None:
        """Let steps after one that all ranks stand at count no more: not all nodes have them, or they are damaged."""
        if not self.url:
            return

        def act() -> list[int]:
            newer = {
                (url, each)
                for url in self._places
                for each in itertools.takewhile(lambda each: each > step, self._committed(url))
            }
            set_aside(sorted(newer))
            return sorted({each for _, each in newer})

        gone = self._ranks.gather(self._ranks.together(lambda: act() if self._is_leader else []))
        if steps := sorted(set().union(*gone)):
            listed = ", ".join(map(str, steps))
            self._ranks.say(f"steps {listed} of {self.url} are not sound on all nodes under this layout: set aside")

    def _held(self, node: Node) -> dict[int, str]:
        """The steps that this node or its peer holds for this node's ranks, and their attempts."""
        share, held = Share(node.first_writer, node.num_local, node.num_writers), dict[int, str]()
        for url in self._places:
            storage = open_storage(url)
            for step in itertools.islice(self._committed(url), MAX_STEPS):
                try:
                    root = read_root(storage, step)
                except CheckFailed:
                    continue
                if root.share == share and root.layout == layout_of(self._config):
                    held.setdefault(step, root.attempt)
        return held

    def _committed(self, url: str) -> Iterator[int]:
        """The steps of one place, newest first; none of a replica that cannot be reached: its peer may be lost."""
        try:
            yield from newest_first(open_storage(url))
        except StorageError as error:
            if url == self._places[0]:
                raise
            if self._is_leader:
                log(f"warning: the replica is left out: {error}")


def set_aside(damaged: list[tuple[str, int]]) -> None:
    """Keep the roots of steps, given by run URL and step, under another name, where it is there still."""
    for url, step in damaged:
        storage, folder = open_storage(url), step_folder(step)
        if storage.info(f"{folder}/{ROOT_KEY}") is None:
            continue
        try:
            storage.copy(f"{folder}/{ROOT_KEY}", f"{folder}/{DAMAGED_ROOT_KEY}")
        except StorageError as error:
            if not is_medium_error(error):
                raise
            storage.write(f"{folder}/{DAMAGED_ROOT_KEY}", b"")  # of this root the disk gives nothing back
        storage.delete([f"{folder}/{ROOT_KEY}"])
