"""The groups of ranks that a layout needs, by name. Pure: nothing is built here."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from ckptkit import Coords, ParallelLayout

Ranks = tuple[int, ...]


def groups_needed(layout: ParallelLayout, kv_replicas: int = 1) -> dict[str, list[Ranks]]:
    """Return the ranks of every group, by the groups' name, in the order in which all ranks build them.

    `tp` and `dp` run along one axis. `tp_dp` is a pipeline rank's: who holds norms and row biases. `ends_dp` is the
    first and the last pipeline rank at one place of tp: who holds a tied matrix. `kv_dp` holds the same key-value
    heads, of which `kv_replicas` neighbours along tp have the same ones. `activations` and `gradients` link each
    pipeline rank to the next; they are two, since opposite directions on one NCCL communicator would wait for each
    other. If ranks hold several stages `activations_back` and `gradients_back` link the last rank to the first. For
    tp2-pp2: tp [(0, 1), (2, 3)], dp [(0,), (1,), (2,), (3,)], tp_dp [(0, 1), (2, 3)], nothing that links back, and
    (0, 2), (1, 3) for the rest.
    """
    columns = _columns(layout, "pp")
    links: list[Ranks] = [pair for column in columns for pair in pairwise(column)]
    back: list[Ranks] = [(column[0], column[-1]) for column in columns if layout.virtual > 1 < layout.pp]
    return {
        "world": [tuple(range(layout.world_size))],
        "tp": _columns(layout, "tp"),
        "dp": _columns(layout, "dp"),
        "tp_dp": _columns(layout, "tp", "dp"),
        "kv_dp": _kv_holders(layout, kv_replicas),
        "ends_dp": [_distinct(row[end] for end in (0, -1) for row in rows) for rows in _by_tp(layout, columns)],
        "activations": links,
        "gradients": links,
        "activations_back": back,
        "gradients_back": back,
    }


def _columns(layout: ParallelLayout, *axes: str) -> list[Ranks]:
    """Return all sets of ranks that differ along `axes` only."""
    columns: dict[Coords, list[int]] = {}
    for rank in range(layout.world_size):
        columns.setdefault(replace(layout.coords(rank), **dict.fromkeys(axes, 0)), []).append(rank)
    return [tuple(column) for column in columns.values()]


def _kv_holders(layout: ParallelLayout, kv_replicas: int) -> list[Ranks]:
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        holders.setdefault((coords.tp // kv_replicas, coords.pp), []).append(rank)
    return [tuple(ranks) for ranks in holders.values()]


def _by_tp(layout: ParallelLayout, columns: list[Ranks]) -> list[list[Ranks]]:
    return [[column for column in columns if layout.coords(column[0]).tp == tp] for tp in range(layout.tp)]


def _distinct(ranks: Iterable[int]) -> Ranks:
    return tuple(dict.fromkeys(ranks))
