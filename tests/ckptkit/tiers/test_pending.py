"""Which steps are copied when, the same on all ranks whatever each of them saw."""

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import Area, Ring, SaveOrder, SaveOutcome, TierCopy
from ckptkit.runs.retention import Retention
from ckptkit.tiers.pending import PendingCopies
from ckptkit.tiers.tier import Tier

SLOW = Tier("s3://slow", every=20)


def order(step: int, writer: int = 0, num_writers: int = 1) -> SaveOrder:
    return SaveOrder(
        seat=Seat("/fast", step, f"a-{step}", writer, num_writers), files=(),
        ring=Ring(0, 1, 1, 1), draft=Area(0, 0), layout={}, num_layers=1, metadata={}, arena_bytes=0, deadline_s=1.0,
        retry_s=0.0, retention=Retention(), code="", stripe_count=0, stripe_size_bytes=0, num_threads=1,
    )  # fmt: skip


def steps(tier_copies: tuple[TierCopy, ...]) -> list[int]:
    return [tier_copy.target.step for tier_copy in tier_copies]


def test_a_rank_alone_makes_up_for_what_it_did_not_save() -> None:
    copies = PendingCopies([SLOW], 1)
    assert steps(copies.due(order(10))) == []
    copies.skipped(20)
    assert steps(copies.due(order(30))) == [30]
    assert steps(copies.due(order(40))) == [40]
    copies.failed(40)
    assert steps(copies.due(order(50))) == [50]
    assert steps(copies.due(order(55))) == []


@given(
    saves=st.lists(st.tuples(st.integers(1, 15), st.sampled_from(["saved", "failed", "skipped", "failed, told all"]))),
    newest=st.sampled_from([None, 0, 20]),
    seed=st.randoms(use_true_random=False),
)
def test_all_ranks_copy_the_same_steps(saves: list[tuple[int, str]], newest: int | None, seed: object) -> None:
    """Though a save failed, or was skipped, on some of them only."""
    tier = Tier("s3://slow", every=20, newest=newest)
    ranks, step = [PendingCopies([tier], 3) for _ in range(3)], newest or 0
    for distance, how in saves:
        step += distance
        told = []
        for writer, copies in enumerate(ranks):
            is_hit = seed.random() < 0.5
            if how == "skipped" and is_hit:
                copies.skipped(step)
                continue
            told.append(steps(copies.due(order(step, writer, 3))))
            if how.startswith("failed") and is_hit:
                copies.failed(step)
        assert all(each == told[0] for each in told)
        if how == "failed, told all":
            for copies in ranks:
                copies.make_up()


def test_what_was_lost_is_taken_up_once_and_of_each_tier_the_newest() -> None:
    copies = PendingCopies([SLOW, Tier("s3://other")], 1)
    for step in (20, 40):
        copies.due(order(step))
    copies.ended([SaveOutcome(40, "", 0, 0.0, url="s3://other")])
    assert [report.step for report in copies.lost("dead while it copied step")] == [20, 20, 40]
    assert copies.has_left
    assert [(each.target.step, each.target.url) for each in copies.take_up()] == [(20, "s3://other"), (40, "s3://slow")]
    assert copies
    assert not copies.has_left
    copies.lost("dead again, at step")
    assert not copies.has_left
    assert not copies


def test_a_step_without_room_goes_to_the_first_place_of_whole_steps() -> None:
    replica = Tier("/peers", of_node=True)
    assert PendingCopies([replica], 1).overflow(order(5), is_window=False) is None
    alone, of_two = PendingCopies([replica, SLOW], 1), PendingCopies([replica, SLOW], 2)
    for seat in (alone.overflow(order(5), is_window=True), of_two.overflow(order(5, 1, 2), is_window=False)):
        assert seat is not None
        assert seat.url == "s3://slow"
    assert of_two.overflow(order(5, 1, 2), is_window=True) is None, "one rank knows nothing of another's room"
    assert of_two.overflow(order(5), is_window=False) is None, "another node has the other half"


def test_after_a_nodes_failure_the_next_step_goes_to_the_first_place_of_whole_steps() -> None:
    tiers = [Tier("/peer/replica", of_node=True), Tier("s3://slow", every=20, newest=0), Tier("/slower", every=20)]
    node = PendingCopies(tiers, 2)
    node.due(order(5))
    node.make_up(goes_to_whole=True)
    assert [each.target.url for each in node.due(order(6))] == ["/peer/replica", "s3://slow"]
    assert [each.target.url for each in node.due(order(7))] == ["/peer/replica"]


def test_a_nodes_part_goes_to_where_the_other_nodes_copy_theirs_if_the_step_is_due_there() -> None:
    node = PendingCopies([Tier("/peer/replica", of_node=True), Tier("s3://slow", every=20, newest=0)], 2)
    assert node.with_tiers(order(5), is_window=False).overflow is None
    found = node.with_tiers(order(20, 0), is_window=True)
    assert found.overflow == Seat("s3://slow", 20, "a-20", 0, 2)
    assert found.goes_beside_nodes
