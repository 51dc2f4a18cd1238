"""Sharing: every wanted granule is read once by one that wants it, loads are level, and line arithmetic is exact."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.blocks import GRANULE_BYTES, num_granules
from ckptkit.loading.sharing import (
    Line,
    Runs,
    clipped,
    common,
    count,
    joined_runs,
    levelled,
    share_reads,
    window,
)
from ckptkit.plan.load_plan import LoadPlan
from tests.support.checks import require_equal

intervals = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))
runs = st.lists(intervals, max_size=6).map(lambda found: joined_runs(np.array(found, np.int64).reshape(-1, 2)))


def granules(runs: Runs) -> list[int]:
    return [granule for first, stop in runs.tolist() for granule in range(first, stop)]


def readers_of(alone: list[Runs], shared: list[Runs]) -> dict[int, tuple[int, bool]]:
    """Return who reads each granule, and whether for itself alone; Different if two do."""
    granules_of_ranks = [
        (granule, (rank, own))
        for own, by_rank in ((True, alone), (False, shared))
        for rank, each in enumerate(by_rank)
        for granule in granules(each)
    ]
    require_equal(len(dict(granules_of_ranks)) == len(granules_of_ranks), "a granule has one reader")
    return dict(granules_of_ranks)


@given(st.lists(runs, min_size=1, max_size=6))
def test_each_wanted_granule_has_one_reader_that_wants_it(runs_of_ranks: list[Runs]) -> None:
    alone, shared = share_reads(runs_of_ranks)
    wants = [set(granules(each)) for each in runs_of_ranks]
    readers = readers_of(alone, shared)
    for granule, (rank, own) in readers.items():
        assert granule in wants[rank]
        assert (sum(granule in each for each in wants) == 1) == own
    assert readers.keys() == set().union(*wants)


@given(st.lists(st.tuples(runs, st.integers(0, 2)), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=80))
def test_who_cannot_read_gets_it_from_one_that_can(ranks: list[tuple[Runs, int]], node_of: list[int]) -> None:
    """Each rank is on a node, and each granule is on the node that `node_of` says, or on one that has a rank."""
    runs_of_ranks, nodes = [each for each, _ in ranks], [node for _, node in ranks]
    holders = [node_of[at] if at < len(node_of) and node_of[at] in nodes else nodes[0] for at in range(80)]
    readable = [
        joined_runs(np.array([(at, at + 1) for at in range(80) if holders[at] == node], np.int64).reshape(-1, 2))
        for node in nodes
    ]
    alone, shared = share_reads(runs_of_ranks, readable)
    wants = [set(granules(each)) for each in runs_of_ranks]
    readers = readers_of(alone, shared)
    for granule, (rank, own) in readers.items():
        assert holders[granule] == nodes[rank]
        who = [other for other in range(len(runs_of_ranks)) if granule in wants[other]]
        assert rank in who or all(nodes[other] != holders[granule] for other in who)
        assert own == (who == [rank])
    assert readers.keys() == set().union(*wants)


def test_those_that_can_read_for_all_read_as_much() -> None:
    all_of_it, nothing = np.array([[0, 12]]), np.empty((0, 2), np.int64)
    alone, shared = share_reads([all_of_it] * 4, [nothing, all_of_it, nothing, all_of_it])
    assert [count(each) for each in alone] == [0, 0, 0, 0]
    assert [count(each) for each in shared] == [0, 6, 0, 6]


@given(runs, st.integers(1, 9))
def test_replicas_share_equally_in_one_stretch_each(wanted_runs: Runs, num_ranks: int) -> None:
    alone, shared = share_reads([wanted_runs] * num_ranks)
    loads = [count(each) for each in (alone if num_ranks == 1 else shared)]
    assert sum(loads) == count(wanted_runs)
    assert max(loads) - min(loads) <= 1
    assert sum(map(len, shared)) <= len(wanted_runs) + num_ranks


def test_who_reads_much_alone_reads_less_for_others() -> None:
    both = np.array([[0, 10]])
    alone, shared = share_reads([both, np.array([[0, 10], [100, 106]])])
    assert [count(each) for each in alone] == [0, 6]
    assert [count(each) for each in shared] == [8, 2]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 100))
def test_levels(load: list[int], total: int) -> None:
    before = np.array(load, np.int64)
    shares = levelled(before, total)
    assert shares.sum() == total
    assert (shares >= 0).all()
    got = (before + shares)[shares > 0]
    assert not len(got) or got.max() <= (before + shares).min() + 1


@given(runs, runs)
def test_what_two_have_in_common(first: Runs, second: Runs) -> None:
    assert granules(common(first, second)) == sorted(set(granules(first)) & set(granules(second)))


@given(runs, st.integers(0, 40), st.integers(0, 40))
def test_windows_are_slices(all_runs: Runs, start: int, length: int) -> None:
    assert granules(window(all_runs, start, start + length)) == granules(all_runs)[start : start + length]


@given(st.lists(intervals, max_size=8), runs)
def test_clipped_spans(spans: list[tuple[int, int]], within: Runs) -> None:
    rows = np.array(sorted(spans), np.int64).reshape(-1, 2)
    span, run, begin, end = clipped(rows, within)
    found = sorted(
        (s, x) for s, a, b in zip(span.tolist(), begin.tolist(), end.tolist(), strict=True) for x in range(a, b)
    )
    inside = set(granules(within))
    assert found == sorted((s, x) for s, (a, b) in enumerate(rows.tolist()) for x in range(a, b) if x in inside)
    assert (np.diff(run) >= 0).all()
    for number in set(run.tolist()):
        assert (np.diff(begin[run == number]) >= 0).all()


@given(st.lists(st.integers(1, 5 * GRANULE_BYTES), min_size=1, max_size=5), st.data())
def test_reads_of_runs_cover_their_bytes_file_by_file(sizes: list[int], data: st.DataObject) -> None:
    line, total = Line(sizes), sum(map(num_granules, sizes))
    first = data.draw(st.integers(0, total - 1))
    run = np.array([[first, data.draw(st.integers(first + 1, total))]])
    reads, offset = line.reads(run)
    assert (reads.source % GRANULE_BYTES == 0).all()
    ends = reads.source + reads.size
    assert all(end == sizes[part] or end % GRANULE_BYTES == 0 for part, end in zip(reads.part, ends, strict=True))
    assert offset.tolist() == (np.cumsum(reads.size) - reads.size).tolist()
    [[begin, end]] = line.bytes_of(run).tolist()
    assert reads.size.sum() == end - begin
    assert granules(line.granules(reads)) == granules(run)


def test_a_copy_over_a_granule_s_edge_wants_both() -> None:
    line, one = Line([3 * GRANULE_BYTES, 10]), np.ones(2, np.int64)
    plan = LoadPlan(np.array([0, 1]), np.array([GRANULE_BYTES - 1, 0]), 0 * one, 0 * one, np.array([2, 10]))
    assert line.granules(plan).tolist() == [[0, 2], [3, 4]]
    assert line.bytes_of(np.array([[3, 4]])).tolist() == [[3 * GRANULE_BYTES, 3 * GRANULE_BYTES + 10]]
