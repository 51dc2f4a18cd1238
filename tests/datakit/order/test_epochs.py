"""Epochs: each is a bijection for every size and name, inverted by `positions`, pinned and well mixed."""

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from datakit.format.shard import Int64s
from datakit.order.epochs import Epochs

LARGE = 2**62


def order(size: int, name: bytes, block_rows: int = 0) -> tuple[Epochs, Int64s]:
    """One source's epochs, and the order of the first one."""
    epochs = Epochs([(name, b"")], [size], [block_rows])
    return epochs, epochs.elements(np.zeros(size, np.int64), np.arange(size))


@given(size=st.integers(1, 3000), name=st.binary(max_size=20))
def test_it_is_a_bijection(size: int, name: bytes) -> None:
    epochs, found = order(size, name)
    assert sorted(found.tolist()) == list(range(size))
    assert epochs.positions(0, 0, found).tolist() == list(range(size))


def permuted(size: int, name: bytes, position: int) -> int:
    """The element at a position of a permutation, as docs/formats/token-store.md has it."""
    num_bits = max(2, (size - 1).bit_length())
    widths = [num_bits // 2, num_bits - num_bits // 2]
    value = position
    while True:
        left, right = value >> widths[1], value % 2 ** widths[1]
        for number in range(8):
            word = right ^ xxhash.xxh3_64_intdigest(name, seed=number)
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (word ^ word >> 31) % 2 ** widths[number % 2]
        value = left << widths[1] | right
        if value < size:
            return value


def expected(size: int, name: bytes, block_rows: int) -> list[int]:
    """All rows of an epoch, in order."""
    if not block_rows:
        return [permuted(size, name, position) for position in range(size)]
    count = -(-size // block_rows)
    blocks = [permuted(count, name + b"/blocks", position) for position in range(count)]
    num_blocks = max(1, min(64, count // 64))
    samples = []
    for window, first in enumerate(range(0, count, num_blocks)):
        rows = [
            row
            for block in blocks[first : first + num_blocks]
            for row in range(size)[block * block_rows : (block + 1) * block_rows]
        ]
        window_name = name + b"/window/%d" % window
        samples += [rows[permuted(len(rows), window_name, place)] for place in range(len(rows))]
    return samples


@given(
    names=st.lists(st.tuples(st.binary(max_size=90), st.binary(max_size=90)), min_size=1, max_size=3),
    size=st.integers(1, 300),
    block_rows=st.integers(0, 4),
    data=st.data(),
)
def test_each_epoch_of_each_source_is_the_order_of_its_name(
    names: list[tuple[bytes, bytes]], size: int, block_rows: int, data: st.DataObject
) -> None:
    """Whatever is asked together."""
    places = st.tuples(st.integers(0, len(names) - 1), st.sampled_from([0, 9, 10**9]), st.integers(0, size - 1))
    asked = data.draw(st.lists(places, min_size=1, max_size=6))
    epochs = Epochs(names, [size] * len(names), [block_rows] * len(names))
    numbers = np.array([epoch * size + position for _, epoch, position in asked])
    found = epochs.elements(np.array([source for source, _, _ in asked]), numbers).tolist()
    for (source, epoch, position), element in zip(asked, found, strict=True):
        before, after = names[source]
        assert element == expected(size, before + str(epoch).encode() + after, block_rows)[position]
        assert epochs.positions(source, epoch, [element]).tolist() == [position]


@given(size=st.integers(1, LARGE), block_rows=st.integers(0, LARGE), name=st.binary(max_size=20), data=st.data())
@example(size=LARGE, block_rows=LARGE, name=b"", data=None)
@example(size=LARGE, block_rows=1, name=b"", data=None)
def test_positions_undo_large_orders(size: int, block_rows: int, name: bytes, data: st.DataObject | None) -> None:
    numbers = st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)
    positions = [0, size - 1] if data is None else data.draw(numbers)
    epochs = Epochs([(name, b"")], [size], [block_rows])
    found = epochs.elements(np.zeros(len(positions), np.int64), np.array(positions))
    assert len(set(found.tolist())) == len(positions)
    assert 0 <= found.min() <= found.max() < size
    assert epochs.positions(0, 0, found).tolist() == positions


def test_what_comes_nowhere_has_no_positions() -> None:
    assert order(10, b"")[0].positions(0, 3, []).tolist() == []


def test_it_is_pinned() -> None:
    """The order of samples is a promise: a change of it would silently change every resumed run."""
    assert order(10, b"seed/fingerprint/")[1].tolist() == [6, 1, 5, 4, 3, 7, 8, 2, 9, 0]
    assert order(10, b"seed/fingerprint/", 3)[1].tolist() == [9, 8, 6, 7, 2, 1, 0, 5, 3, 4]


def test_names_give_unrelated_orders() -> None:
    first, second = (order(10_000, name)[1] for name in (b"a", b"b"))
    assert (first == second).sum() < 10  # 1 expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05


@pytest.mark.parametrize("size", [5, 64, 1000])
def test_every_element_comes_to_every_place(size: int) -> None:
    """Chi-square over epochs of where element 0 goes; 5 sigma."""
    num_epochs = 20 * size
    epochs = Epochs([(b"", b"")], [size])
    places = epochs.elements(np.zeros(num_epochs, np.int64), np.arange(num_epochs) * size)
    expected = num_epochs / size
    chi_square = ((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum()
    assert abs(chi_square - (size - 1)) < 5 * np.sqrt(2 * (size - 1))


@given(size=st.integers(1, 700), block_rows=st.integers(1, 30), name=st.binary(max_size=4))
@example(size=10_000, block_rows=2, name=b"")
@example(size=9_999, block_rows=10, name=b"")
def test_an_epoch_of_blocks_reads_every_row_once_and_few_blocks_at_a_time(
    size: int, block_rows: int, name: bytes
) -> None:
    epochs, found = order(size, name, block_rows)
    rows = found.tolist()
    assert sorted(rows) == list(range(size))
    assert epochs.positions(0, 0, rows).tolist() == list(range(size))
    num_blocks = -(-size // block_rows)
    most = max(1, min(64, num_blocks // 64))
    at, seen = 0, set[int]()
    while at < size:  # window by window: as many blocks as one has, none of them seen before
        window: list[int] = []
        blocks: set[int] = set()
        while at < size and len(blocks | {rows[at] // block_rows}) <= most:
            blocks.add(rows[at] // block_rows)
            window.append(rows[at])
            at += 1
        assert not blocks & seen
        seen |= blocks
        assert len(window) == sum(min(block_rows, size - block * block_rows) for block in blocks)


def test_orders_of_other_names_and_windows_differ() -> None:
    rows = [order(4096, name, 8)[1].tolist() for name in (b"a", b"b")]
    assert rows[0] != rows[1]
    assert sum(abs(one - other) == 1 for one, other in zip(rows[0], rows[0][1:], strict=False)) < 4096 / 16
    first, second = ([row % 8 for row in rows[0][at : at + 128]] for at in (0, 128))
    assert first != second
