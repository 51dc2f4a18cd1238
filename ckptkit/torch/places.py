"""Places: where a run of a PyTorch program has its steps: one place or each node's own, a replica, slower tiers."""

import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TypeVar

from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.runs.fallback import Candidate, committed_candidates, set_aside
from ckptkit.runs.rollback import RollbackReport
from ckptkit.runs.run import Run
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.tiers.node_places import NodePlaces, nodes_here, own_name
from ckptkit.tiers.node_steps import NodeSteps
from ckptkit.tiers.tier import NODE, PEER, Node, Tier, Tiers
from threefold.cli import log
from threefold.errors import UserError

T = TypeVar("T")


class Places:
    """Where a run of a PyTorch program has its steps; `url` is what all ranks have written, `own_url` this node's.

    All ranks call the methods that take an exchange.
    """

    def __init__(self, url: str, options: CheckpointerOptions) -> None:
        """Take the URL and the options of a run; UserError where they do not go together."""
        self._options, self._tiers = options, _node_tiers(url, options)
        self.own_url = url.replace(NODE, own_name(options.node)) if NODE in url else url
        self.slower = [Run(tier.url) for tier in (self._tiers.slower if self._tiers else options.tiers)]
        self._first = Run(self.own_url)
        self._nodes: NodeSteps | None = None

    @property
    def are_of_nodes(self) -> bool:
        """Whether the first place is each node's own."""
        return self._tiers is not None

    @property
    def node(self) -> Node | None:
        """Return this rank's node, once its steps were looked at."""
        return None if self._tiers is None else self._tiers.node

    def nodes(self, exchange: Exchange) -> NodeSteps:
        """Return the steps of all nodes."""
        assert self._tiers is not None, "the first place is each node's own"
        if self._nodes is None:
            nodes = nodes_here(exchange, self._options.node)
            self._tiers = tiers = replace(self._tiers, node=nodes[exchange.rank])
            own = NodePlaces(tiers.own_urls, nodes[exchange.rank], exchange.rank)
            self._nodes = NodeSteps(tiers.first.url, own, nodes, exchange)
        return self._nodes

    def forget(self) -> None:
        """Let go of what was seen on the nodes, with the exchange that saw it."""
        self._nodes = None

    def own(self, exchange: Exchange) -> list[Run]:
        """Return the places that this rank is to keep in order: of a node its first rank, else the first of all."""
        if self._tiers is None:
            return [self._first] if exchange.rank == 0 else []
        places = self.nodes(exchange).places
        return places.runs if places.leads else []

    def candidates(self, exchange: Exchange, only: int | None) -> Iterator[Candidate]:
        """Yield the steps that may be loaded, newest first, each with the place that it is in; with a step that one."""
        slower = [place.url for place in self.slower]
        if self._tiers is None:
            yield from committed_candidates([self.own_url, *slower], exchange, only)
            return
        own = (Candidate(self._first.storage.address, step) for step in self.nodes(exchange).candidates(only))
        shared = committed_candidates(slower, exchange, only, needed=False)
        candidate = None
        for candidate in heapq.merge(own, shared, key=lambda each: -each.step):
            yield candidate
        if candidate is None:
            raise self._lacking(only)

    def whole(self, exchange: Exchange, only: int | None) -> Iterator[int]:
        """Yield the steps that all nodes together hold, or a slower place, newest first; with a step that one."""
        slower = [place.url for place in self.slower]
        shared = (each.step for each in committed_candidates(slower, exchange, only, needed=False))
        merged = heapq.merge(self.nodes(exchange).whole(only), shared, reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def read(self, candidate: Candidate, exchange: Exchange, work: Callable[[CheckpointReader], T]) -> T:
        """Return what `work` does with an open step; CheckFailed on all ranks where the step is damaged."""
        url, step = candidate.url, candidate.step
        if self._is_of_nodes(url):
            return self.nodes(exchange).read(step, work)
        storage = on_all(exchange, lambda: next(
            (place.storage for place in self.slower if place.storage.address == url), self._first.storage
        ))  # fmt: skip
        root = read_root(storage, step, exchange)
        if root.share is not None:
            raise UserError(
                f"step {step} of {storage.url} holds the files of {root.share.count} of {root.share.of} writers",
                hint=f"load from a place that all nodes share, or write {NODE} for the node's name",
            )
        with CheckpointReader(storage, step, root=root) as reader:
            return work(reader)

    def set_aside(self, loaded: Candidate, damaged: Iterable[Candidate], exchange: Exchange) -> None:
        """Set aside what was passed over: damaged steps of shared places, and on all nodes what is newer."""
        url, step = loaded.url, loaded.step
        if self._tiers is not None:
            self.nodes(exchange).set_aside_after(step if self._is_of_nodes(url) else step - 1)
        if exchange.rank == 0:
            set_aside((each for each in damaged if not self._is_of_nodes(each.url)), log)

    def rollback(self, step: int, exchange: Exchange, *, dry_run: bool) -> RollbackReport:
        """Set the steps after one aside on all nodes and in slower places; UserError, before, if none holds it."""
        if next(self.whole(exchange, step), None) is None:
            raise self._lacking(step)
        places = [*self.own(exchange), *(self.slower if exchange.rank == 0 else ())]
        report = RollbackReport(self.nodes(exchange).url, step, dry_run)

        def act(is_trial: bool) -> bytes:
            done = [place.set_aside_after(step, dry_run=is_trial) for place in places]
            return json.dumps([[each.set_aside, each.quarantined] for each in done]).encode()

        for is_trial in (True, False)[: 1 if dry_run else 2]:  # a pin anywhere is found before anything goes
            done = [each for heard in agreed(exchange, partial(act, is_trial)) for each in json.loads(heard)]
            report.set_aside = sorted({number for aside, _ in done for number in aside}, reverse=True)
            report.quarantined = sorted({number for _, damaged in done for number in damaged}, reverse=True)
        return report

    def prepare_saves(self, step: int, token: str, exchange: Exchange) -> int | None:
        """See to it, before the first save, that each node has a place of its own, and no remains in its way.

        Return the newest step that the nodes hold together.
        """
        if self._tiers is None:
            return None
        nodes = self.nodes(exchange)
        nodes.check_apart(token)
        nodes.set_aside_broken(step)
        return next(nodes.whole(), None)

    def destinations(self, exchange: Exchange, last: int | None) -> tuple[Tier, ...]:
        """Return the tiers that a step is copied to: the replica first. A slower one's turn depends on what is there.

        What is newer than `last` does not count.
        """

        def newest() -> bytes:
            steps = [place.newest_first() for place in self.slower if exchange.rank == 0]
            most = math.inf if last is None else last
            return json.dumps([next((step for step in each if step <= most), 0) for each in steps]).encode()

        known = json.loads(agreed(exchange, newest)[0]) if self.slower else []
        tiers = self._options.tiers if self._tiers is None else self._tiers.destinations
        shared = [tier for tier in tiers if not tier.of_node]
        found = [
            tier if tier.newest is not None else replace(tier, newest=step)
            for tier, step in zip(shared, known, strict=True)
        ]
        return (*(tier for tier in tiers if tier.of_node), *found)

    def _lacking(self, step: int | None) -> UserError:
        """Return the error that no place holds a step, or any."""
        assert self._tiers is not None, "the first place is each node's own"
        text = f"no node holds {'a step' if step is None else f'step {step}'} of {self._tiers.first.url}"
        slower = "".join(f", nor does {place.url}" for place in self.slower)
        return UserError(f"{text}{slower}", hint=f"check the URL; on this node: ckptkit ls {quote(self.own_url)}")

    def _is_of_nodes(self, url: str) -> bool:
        return self._tiers is not None and url == self._first.storage.address


def _node_tiers(url: str, options: CheckpointerOptions) -> Tiers | None:
    """Return the tiers of a run whose first one is each node's own, None of one place for all; its `node` is not set.

    UserError where they do not go together.
    """
    is_of_node = NODE in url or options.node is not None
    replicas = [tier for tier in options.tiers if tier.of_node or NODE in tier.url or PEER in tier.url]
    if PEER in url:
        raise UserError(f"{url}: {PEER} has a meaning in a replica only", hint=f"name each node's own folder {NODE}")
    if not is_of_node and not replicas:
        return None
    hint = f'Run("/nvme/run/{NODE}", CheckpointerOptions(tiers=(Tier("/peers/{PEER}/replica/{NODE}"),)))'
    if not is_of_node:
        raise UserError(f"{replicas[0].url} is of one node, and {url} is one place for all nodes", hint=hint)
    for tier in replicas:
        if options.node is None and not (NODE in tier.url and PEER in tier.url):
            raise UserError(
                f"{tier.url}: of the slower tiers only a replica is of one node, and it names {PEER} and {NODE}",
                hint=hint,
            )
        if tier.every or tier.retention.has_rules:
            raise UserError(
                f"{tier.url} is a replica, which takes every save and keeps the steps that the first tier keeps",
                hint=f'Tier("{tier.url}")',
            )
    if len(replicas) > 1:
        raise UserError(f"{replicas[0].url} and {replicas[1].url} are two replicas", hint="leave one out")
    slower = tuple(tier for tier in options.tiers if tier not in replicas)
    first = Tier(url, retention=options.retention, of_node=True)
    return Tiers(first, slower, replicas[0].url if replicas else "")
