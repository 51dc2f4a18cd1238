"""Shares: what repeats is counted by content, however many stores hold it, as a walk over all samples counts it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, MegatronBlend, MegatronOrder, Segment, TokenStore, write_store
from datakit.reports.shares import shares, unread_lines

L = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """A store of 50 rows, its copy, and another store of 19."""
    folder = tmp_path_factory.mktemp("stores")
    sizes = {"a": 401, "copy": 401, "b": 160}
    return [write_store(folder / name, [np.arange(size)], vocab_size=500) for name, size in sizes.items()]


@settings(max_examples=30)
@given(
    weights=st.tuples(*[st.integers(1, 6)] * 3),
    later=st.tuples(*[st.integers(0, 3)] * 3).filter(any),
    skip=st.integers(0, 130),
    num_samples=st.integers(1, 400),
    orders_copies=st.booleans(),
)
def test_repeats_of_copies_are_those_of_a_walk_over_the_samples(
    stores: list[TokenStore], weights: tuple[int, ...], later: tuple[int, ...], skip: int, num_samples: int,
    orders_copies: bool,
) -> None:  # fmt: skip
    segment = Segment(90, tuple(map(float, later)), ((100, 100 + skip),) if skip else ())
    blend = Blend(list(zip(stores, weights)), seq_length=L, later=[segment], orders_copies=orders_copies)
    sources, starts = blend.addresses(np.arange(num_samples))
    rows = {source: starts[sources == source].tolist() for source in range(3)}
    reported = shares(blend, num_samples)
    first = len(set(rows[0]))
    assert reported[0].repeated_samples == len(rows[0]) - first
    assert reported[1].repeated_samples == len(rows[1]) - (len({*rows[0], *rows[1]}) - first)
    alone = len(rows[2]) - len(set(rows[2]))
    assert reported[2].repeated_samples == max(len(rows[2]) - 19, 0) <= alone
    assert alone == reported[2].repeated_samples or skip


def test_rows_of_another_length_do_not_repeat_those_of_the_first(stores: list[TokenStore]) -> None:
    segments = [Segment(60, seq_length=4), Segment(120, seq_length=L)]
    blend = Blend([(stores[0], 1), (stores[1], 1)], seq_length=L, later=segments)
    sources, starts = blend.addresses(np.arange(180))
    read = [(blend.sources.seq_lengths[source], start) for source, start in zip(sources.tolist(), starts.tolist())]
    repeated = [share.repeated_samples for share in shares(blend, 180)]
    assert sum(repeated) == 180 - len(set(read))
    assert repeated[0] == 0 < repeated[4]


def test_in_the_order_of_megatron_they_are_at_least_what_the_rows_leave(stores: list[TokenStore]) -> None:
    blend = MegatronBlend(stores[:2], [1.0, 1.0], seq_length=L, seed=3, order=MegatronOrder(80))
    assert [share.repeated_samples for share in shares(blend, 80)] == [0, 30]


@given(num_tokens=st.integers(1, 200), length=st.integers(1, 60))
def test_tokens_after_the_last_row_are_counted(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, length: int
) -> None:
    store = write_store(tmp_path_factory.mktemp("unread") / "store", [range(num_tokens)], vocab_size=256)
    other = write_store(tmp_path_factory.mktemp("unread") / "long", [range(200)] * 50, vocab_size=256)
    blend = Blend([(other, 1.0), (store, 0.0)], seq_length=length)
    rows = int(blend.rows[1])
    is_read = np.zeros(num_tokens, np.bool_)
    for row in range(rows):
        is_read[row * length : row * length + length + 1] = True
    assert shares(blend, 10)[1].unread_tokens == (~is_read).sum()
    lines = [line for line in unread_lines(blend) if f"of {store.path}" in line]
    assert len(lines) == ((~is_read).sum() > num_tokens / 100)


def test_a_line_names_store_and_part(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [range(12)], vocab_size=12)
    blend = Blend([(store, 1.0)], seq_length=4)
    assert unread_lines(blend) == [f"the last 3 tokens of {store.path}, 25.0%, are in no row of 4 tokens"]
