"""Copies of a store in a blend: each has an order of its own, by the format page; older runs go on as they began."""

import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, Cursor, Loader, MegatronBlend, MegatronOrder, Segment, StreamRecord, TokenStore, write_store
from datakit.format.shard import Int64s
from datakit.order.epochs import Epochs
from threefold.errors import UserError

L, ROWS = 8, 50


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """A store of 50 rows, its copy, and another store."""
    folder = tmp_path_factory.mktemp("stores")
    sizes = {"a": 401, "copy": 401, "b": 160}
    return [write_store(folder / name, [np.arange(size)], vocab_size=500) for name, size in sizes.items()]


def named(name: str, after: str = "", rows: int = ROWS) -> list[int]:
    """Return the rows of two epochs in the order of a name."""
    numbers = np.arange(2 * rows)
    return Epochs([(name.encode(), after.encode())], [rows]).elements(np.zeros_like(numbers), numbers).tolist()


def orders(blend: Blend, num_samples: int) -> list[list[int]]:
    """Return the rows that the first samples read, by source."""
    sources, starts = blend.addresses(np.arange(num_samples))
    rows: Int64s = starts // np.array(blend.sources.seq_lengths)[sources]
    return [rows[sources == source].tolist() for source in range(len(blend.stores))]


@pytest.mark.parametrize("chosen", [[0, 0], [0, 1], [1, 0, 2, 0]])
def test_each_occurrence_of_a_content_has_the_order_of_the_format_page(
    stores: list[TokenStore], chosen: list[int]
) -> None:
    blend, fingerprint = Blend([(stores[k], 1) for k in chosen], seq_length=L, seed=7), stores[0].fingerprint
    seen = 0
    for source, found in zip(chosen, orders(blend, 240)):
        if source == 2:
            assert found[:38] == named(f"7/{stores[2].fingerprint}/", rows=19)
            continue
        key = f"7/{fingerprint}#{seen}/" if seen else f"7/{fingerprint}/"
        assert found[:80] == named(key)[: len(found[:80])]
        seen += 1


def test_blocks_and_later_lengths_of_rows_have_such_names_too(stores: list[TokenStore]) -> None:
    pair, fingerprint = [(stores[0], 1), (stores[1], 1)], stores[0].fingerprint
    longer = Blend(pair, seq_length=4, seed=7, later=[Segment(40, seq_length=L)])
    _, _, first, second = orders(longer, 120)
    assert first == named(f"7/{fingerprint}/", "/1")[: len(first)]
    assert second == named(f"7/{fingerprint}#1/", "/1")[: len(second)]
    blocks = Blend(pair, seq_length=L, seed=7, block_tokens=4 * L)
    names = [(f"7/{fingerprint}/".encode(), b""), (f"7/{fingerprint}#1/".encode(), b"")]
    epochs, numbers = Epochs(names, [ROWS] * 2, [4] * 2), np.arange(40)
    for source, found in enumerate(orders(blocks, 80)):
        assert found[:30] == epochs.elements(np.full_like(numbers, source), numbers).tolist()[:30]


@settings(max_examples=15)
@given(
    weights=st.lists(st.tuples(*[st.integers(0, 3)] * 4).filter(any), min_size=1, max_size=5),
    gap=st.integers(1, 60),
    skips=st.booleans(),
)
def test_what_is_appended_never_changes_what_was_read(
    stores: list[TokenStore], weights: list[tuple[int, ...]], gap: int, skips: bool
) -> None:
    sources = [stores[0], stores[1], stores[0], stores[2]]
    skip = ((3 * gap, 3 * gap + 2),) if skips else ()
    segments = [Segment(1 + gap * k, tuple(map(float, each)), skip * (k == 1)) for k, each in enumerate(weights)]
    whole = Blend([(store, 1.0 * (k == 1)) for k, store in enumerate(sources)], seq_length=L, later=segments)
    for num_segments in range(len(segments)):
        begun = Blend(
            [(store, 1.0 * (k == 1)) for k, store in enumerate(sources)], seq_length=L, later=segments[:num_segments]
        )
        num_samples = segments[num_segments].from_sample
        assert orders(begun, num_samples) == orders(whole, num_samples)
        whole.check(Cursor.start(begun, num_samples))


@pytest.fixture
def older(stores: list[TokenStore]) -> Blend:
    return Blend([(stores[0], 2), (stores[1], 1)], seq_length=L, seed=3, orders_copies=False)


@pytest.fixture
def newer(stores: list[TokenStore]) -> Blend:
    return Blend([(stores[0], 2), (stores[1], 1)], seq_length=L, seed=3)


def test_an_older_run_goes_on_in_its_order_with_a_line(stores: list[TokenStore], older: Blend, newer: Blend) -> None:
    with Loader(older, 2, 3) as loader:
        steps = [loader.next_step().tokens.copy() for _ in range(8)]
    cursor, state = Cursor.start(older, 18), Loader(older, 2, 3, cursor=Cursor.start(older, 18)).state_dict()
    assert "orders_copies" not in state["stream"]
    assert not StreamRecord.from_json(state["stream"]).orders_copies
    line = (
        f"the run goes on as it began, copies of a store in one order, so that their rows come twice: {stores[1].place}"
    )
    with pytest.warns(UserWarning, match=f"^{line}$"):
        begun = Loader(newer, 2, 3, cursor=cursor)
    with Loader(newer, 2, 3) as loaded:
        other = loaded.next_step().tokens
        assert (other != steps[0]).any()
        with pytest.warns(UserWarning, match="as it began"):
            loaded.load_state_dict(state)
        for loader in (begun, loaded, pickle.loads(pickle.dumps(loaded))):
            assert loader.state_dict() == state
            for step in steps[3:]:
                assert (loader.next_step().tokens == step).all()
    begun.close()


@pytest.mark.filterwarnings("error")
def test_a_stream_in_the_older_order_follows_a_cursor_of_the_newer(older: Blend, newer: Blend) -> None:
    cursor = Cursor.start(newer, 18)
    assert older.following(cursor).digest() == newer.digest()
    with Loader(older, 2, 3) as loader, Loader(newer, 2, 3, cursor=cursor) as other:
        loader.load_state_dict(other.state_dict())
        assert loader.state_dict() == other.state_dict()
        assert (loader.next_step().tokens == other.next_step().tokens).all()


@pytest.mark.filterwarnings("ignore:the run goes on as it began")
def test_a_step_in_flight_reads_of_one_stream_while_a_state_brings_another(
    older: Blend, newer: Blend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, blends, usual = threading.Event(), list[tuple[Blend, Blend]](), Loader.read_ahead

    def read_ahead(loader: Loader, *arguments: int, **named: int) -> None:
        before = loader.blend
        begun.set()
        time.sleep(0.2)
        blends.append((before, loader.blend))
        usual(loader, *arguments, **named)

    monkeypatch.setattr(Loader, "read_ahead", read_ahead)
    with Loader(newer, 2, 3) as loader, Loader(older, 2, 3) as other:
        loader.prefetch()
        assert begun.wait(60)
        loader.load_state_dict(other.state_dict())
        assert loader.blend.digest() == older.digest() != newer.digest()
        assert (loader.next_step().tokens == other.next_step().tokens).all()
    assert len(blends) >= 2
    assert all(before is after for before, after in blends)


@pytest.mark.filterwarnings("ignore:the run goes on as it began")
def test_a_cursor_that_is_refused_leaves_the_stream_as_it_is(stores: list[TokenStore]) -> None:
    pair, later = [(stores[0], 1), (stores[1], 1)], [Segment(40, seq_length=L)]
    newer = Blend(pair, seq_length=4, later=later)
    inside = Cursor.start(Blend(pair, seq_length=4, later=later, orders_copies=False), 1)
    with Loader(newer, 2, 1) as loader:
        with pytest.raises(UserError, match="in the middle of the step"):
            loader.load_state_dict(inside.to_json())
        assert loader.blend is newer


@pytest.mark.filterwarnings("error")
def test_a_run_of_now_says_so_and_one_without_copies_needs_no_line(stores: list[TokenStore], newer: Blend) -> None:
    with Loader(newer, 2, 3) as loader:
        loader.next_step()
        state = loader.state_dict()
        assert state["stream"]["orders_copies"] is True
        loader.load_state_dict(state)
    single = [(stores[0], 1.0), (stores[2], 1.0)]
    cursor = Cursor.start(Blend(single, seq_length=L, orders_copies=False), 10)
    joined = Blend([*single, (stores[1], 0.0)], seq_length=L, later=[(10, (1.0, 1.0, 1.0))])  # a copy joins later
    with Loader(joined, 2, 1, cursor=cursor) as loader:
        assert loader.blend is joined
    assert orders(joined, 60)[2] == named(f"0/{stores[0].fingerprint}#1/")[: len(orders(joined, 60)[2])]


def test_the_older_order_is_one_for_all_copies(stores: list[TokenStore], older: Blend) -> None:
    first, second = orders(older, 60)
    assert first[: len(second)] == second == named(f"3/{stores[0].fingerprint}/")[: len(second)]


def test_the_order_of_megatron_is_what_it_was(stores: list[TokenStore]) -> None:
    blend = MegatronBlend(stores[:2], [1.0, 1.0], seq_length=L, seed=3, order=MegatronOrder(60))
    first, second = orders(blend, 60)
    assert first == second
    assert "orders_copies" not in blend.record.to_json()
    assert blend.following(Cursor.start(blend, 10)) is blend


def test_masks_and_shares_of_a_copy_are_not_those_of_the_other(stores: list[TokenStore]) -> None:
    def masking(source: int) -> Blend:
        return Blend([(stores[0], 2), (stores[1], 1)], seq_length=L, later=[Segment(5, masked=((source, 0),))])

    assert masking(0).digest() != masking(1).digest()
    before = Blend([(stores[0], 2), (stores[1], 1)], seq_length=L).record
    after = Blend([(stores[0], 1), (stores[1], 1)], seq_length=L).record
    shares = [f"the share of {store.path} was {was}, is 0.5" for store, was in zip(stores, ("0.666667", "0.333333"))]
    assert before.differences(after, 10) == [f"segment 0: {share}" for share in shares]
    alone = Blend([(stores[0], 2)], seq_length=L).record
    assert f"segment 0: {stores[1].path} ({stores[1].fingerprint[:8]}, 50 rows) is missing" in before.differences(
        alone, 10
    )


def test_a_copy_elsewhere_is_the_same_stream(stores: list[TokenStore], tmp_path: Path, newer: Blend) -> None:
    moved = write_store(tmp_path / "moved", [np.arange(401)], vocab_size=500)
    again = Blend([(moved, 2), (stores[0], 1)], seq_length=L, seed=3)
    assert orders(again, 90) == orders(newer, 90)
    again.check(Cursor.start(newer, 90))
