"""Tiers: the places that a run's steps are kept in, fastest first; how they are written down, and which are due when.

`URL,every=N,keep_last=N,...` (all rules of a Retention may be given), and for the first tier `replica=URL`. A URL may
hold commas: only what looks like `,name=` at its end is an option. `{node}` in the first URL makes it a run of its own
on each node; `{peer}` in a replica is the node that keeps it. Nothing here touches a storage.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.runs.retention import Retention
from threefold.errors import UserError

NODE, PEER = "{node}", "{peer}"
NODE_VARIABLE = "THREEFOLD_NODE"
GRAMMAR = "URL,every=N,keep_last=N"  # and other rules of a Retention
_OPTION = re.compile(r",([A-Za-z_][A-Za-z0-9_-]*)=")
_RULES = ("keep_last", "keep_every", "keep_best", "keep_hourly")
_NUMBERS = ("every", *_RULES)
_TEXTS = ("metric", "mode")
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, slots=True)
class Tier:
    """One place. The first takes every save; to a slower one the first save at or after each multiple of `every` is
    copied, 0: each save. `retention` says which steps stay there.

    `of_node`: the URL is this node's alone, and so holds the files of this node's writers only. `newest`: the newest
    step that is there when a run starts, 0 for none, the same on all ranks; None where that is not known.
    """

    url: str
    every: int = 0
    retention: Retention = field(default_factory=Retention)
    of_node: bool = False
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One of the nodes of a run: its name, the next node's, and the writers on it, of num_writers in all."""

    name: str
    peer: str
    first_writer: int
    num_local: int
    num_writers: int


@dataclass(frozen=True, slots=True)
class Tiers:
    """All places of a run, parsed once. `replica` is "" or of the first tier.

    URLs are as written and may hold {node} and {peer}; `own_urls` and `destinations` have the names of `node` filled
    in, of the one node that a rank is on. `node` is None if the first tier is one place for all nodes.
    """

    first: Tier
    slower: tuple[Tier, ...] = ()
    replica: str = ""
    node: Node | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the tiers as written, fastest first."""
        return (self.first.url, *(tier.url for tier in self.slower))

    @property
    def own_urls(self) -> tuple[str, ...]:
        """Return where this node saves to, then where its peer keeps the replica, if it does."""
        return tuple(self._filled(url) for url in (self.first.url, self.replica) if url)

    @property
    def destinations(self) -> tuple[Tier, ...]:
        """Return where a step goes after the first tier: its replica, then the slower tiers."""
        replicas = (Tier(url, retention=self.first.retention, of_node=True) for url in self.own_urls[1:])
        return (*replicas, *self.slower)

    def _filled(self, url: str) -> str:
        return url if self.node is None else url.replace(NODE, self.node.name).replace(PEER, self.node.peer)


def parse_tiers(texts: Sequence[str]) -> Tiers:
    """Return the tiers of a run, fastest first; UserError where one is not well written or they do not go together."""
    assert texts, "at least one tier"
    parsed = [_parse(text) for text in texts]
    replica = parsed[0][1].pop("replica", "")
    tiers = [_tier(url, options, text) for (url, options), text in zip(parsed, texts, strict=True)]
    tiers[0] = replace(tiers[0], of_node=NODE in tiers[0].url)
    if tiers[0].every:
        raise UserError(
            f"{texts[0]}: the first tier takes every save, `every` is for slower ones", hint="--save-interval N"
        )
    for tier in tiers[1:]:
        if NODE in tier.url:
            raise UserError(
                f"{tier.url}: only the first tier may be of one node, slower ones hold whole steps",
                hint=f"leave out {NODE}",
            )
    for url in [tier.url for tier in tiers]:
        if PEER in url:
            raise UserError(f"{url}: {PEER} has a meaning in replica= only", hint=f"name each node's own folder {NODE}")
    if replica and (not tiers[0].of_node or NODE not in replica or PEER not in replica):
        raise UserError(
            f"replica={replica}: a replica is of a first tier with {NODE}, and is kept by the next node, {PEER}",
            hint=f"--save /nvme/run/{NODE},replica=/peers/{PEER}/replica/{NODE}",
        )
    urls = [tier.url.rstrip("/") for tier in tiers]
    for url in urls:
        if urls.count(url) > 1:
            raise UserError(f"{url} is named twice as a tier", hint="name each tier once, the fastest first")
    return Tiers(tiers[0], tuple(tiers[1:]), replica)


def node_name(environment: Mapping[str, str], host_name: str) -> str:
    """Return the name of this node.

    $THREEFOLD_NODE, else the host's. UserError where it could not be part of a path.
    """
    name = environment.get(NODE_VARIABLE) or host_name
    if not _NODE_NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name for a node's folder", hint=f"export {NODE_VARIABLE}=node0")
    return name


def nodes_of(names: Sequence[str], first_writers: Sequence[int]) -> list[Node]:
    """Return the node of each rank, from its node's name and first rank; its peer is the next one in order of ranks.

    UserError where two nodes have one name.
    """
    starts = sorted(set(first_writers))
    name_of = {start: names[start] for start in starts}
    if len(set(name_of.values())) < len(starts):
        twice = next(name for name in name_of.values() if list(name_of.values()).count(name) > 1)
        raise UserError(
            f"{list(name_of.values()).count(twice)} nodes have the name {twice}",
            hint=f"give each its own: export {NODE_VARIABLE}=node$SLURM_NODEID",
        )
    ends = dict(zip(starts, [*starts[1:], len(names)], strict=True))
    next_start = dict(zip(starts, [*starts[1:], starts[0]], strict=True))
    return [
        Node(name_of[start], name_of[next_start[start]], start, ends[start] - start, len(names))
        for start in first_writers
    ]


def _parse(text: str) -> tuple[str, dict[str, str]]:
    """Return the URL and the options of one tier's text."""
    pieces = _OPTION.split(text)
    url, names, values = pieces[0], pieces[1::2], pieces[2::2]
    if not url:
        raise UserError(f"{text!r} names no URL", hint=f"write a tier as {GRAMMAR}")
    for name in names:
        if name not in (*_NUMBERS, *_TEXTS, "replica"):
            raise UserError(
                f"{text}: unknown option {name}, known are {', '.join(_NUMBERS + _TEXTS)}; for the first tier replica",
                hint=f"write a tier as {GRAMMAR}; a comma of a path before a name and = is written %2C: file:///a%2Cb=c",
            )
        if names.count(name) > 1:
            raise UserError(f"{text}: {name} is given twice", hint=f"write a tier as {GRAMMAR}")
    return url, dict(zip(names, values, strict=True))


def _tier(url: str, options: Mapping[str, str], text: str) -> Tier:
    if "replica" in options:
        raise UserError(f"{text}: a replica is of the first tier", hint=f"write a slower tier as {GRAMMAR}")
    for name, value in options.items():
        if name in _NUMBERS and not (value.isascii() and value.isdecimal()):
            raise UserError(f"{text}: {name}={value} is not a whole number", hint=f"write a tier as {GRAMMAR}")
    rules: dict[str, Any] = {name: int(options[name]) for name in _RULES if name in options}
    rules |= {name: options[name] for name in _TEXTS if name in options}
    return Tier(url, int(options.get("every", 0)), Retention(**rules))
