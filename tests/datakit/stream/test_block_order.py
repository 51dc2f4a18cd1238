"""BlockOrder: every row once an epoch, one window's blocks at a time, inverted by `positions`."""

from hypothesis import example, given
from hypothesis import strategies as st

from datakit.stream.block_order import MAX_WINDOW_BLOCKS, WINDOW_PART, BlockOrder, block_elements_at


@given(size=st.integers(1, 700), block_rows=st.integers(1, 30), key=st.binary(max_size=4))
@example(size=10_000, block_rows=2, key=b"")
@example(size=9_999, block_rows=10, key=b"")
def test_an_epoch_reads_every_row_once_and_few_blocks_at_a_time(size: int, block_rows: int, key: bytes) -> None:
    order = BlockOrder(size, key, block_rows)
    rows = block_elements_at([(order, position) for position in range(size)])
    assert sorted(rows) == list(range(size))
    assert order.positions(rows).tolist() == list(range(size))
    num_blocks = -(-size // block_rows)
    most = max(1, min(MAX_WINDOW_BLOCKS, num_blocks // WINDOW_PART))
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


def test_orders_of_other_keys_and_windows_differ() -> None:
    orders = [BlockOrder(4096, key, 8) for key in (b"a", b"b")]
    rows = [block_elements_at([(order, position) for position in range(4096)]) for order in orders]
    assert rows[0] != rows[1]
    assert sum(abs(one - other) == 1 for one, other in zip(rows[0], rows[0][1:], strict=False)) < 4096 / 16
    first, second = ([row % 8 for row in rows[0][at : at + 128]] for at in (0, 128))
    assert first != second


def test_access_is_far_into_a_huge_store() -> None:
    order = BlockOrder(1 << 50, b"k", 1024)
    positions = [0, 12345, (1 << 50) - 1, 1 << 49]
    assert order.positions(block_elements_at([(order, position) for position in positions])).tolist() == positions
