"""A stream holds every byte of every file once, in blocks of one file each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.handoff.block_layout import BlockLayout
from ckptkit.model.chunk_table import cut
from ckptkit.plan.save_plan import plan_save
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import ONE, SMALL, pieces_of


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 30))
def test_cuts_are_where_blocks_end_and_nowhere_else(sizes: list[int], block_bytes: int) -> None:
    columns = cut(np.array(sizes, np.int64), block_bytes)
    rows = [tuple(row) for row in np.stack(columns, axis=1).tolist()]
    expected, position = [], 0
    for source, size in enumerate(sizes):
        for offset in range(size):
            block, at = divmod(position, block_bytes)
            if offset and at:
                expected[-1][-1] += 1
            else:
                expected.append([source, offset, block, at, 1])
            position += 1
    assert rows == [tuple(row) for row in expected]


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(500, 20_000))
def test_the_blocks_of_a_stream_are_its_files(max_chunks: int, block_bytes: int) -> None:
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
    plan = plan_save(pieces, SMALL, max_chunks=max_chunks)
    layout = BlockLayout.of(plan, len(pieces), block_bytes)
    sources = [piece.data.tobytes() for piece in pieces] + [file.header for file in plan.files]
    for number, (file, rows) in enumerate(zip(plan.files, plan.rows, strict=True)):
        blocks = b""
        first, stop = layout.first_blocks[number : number + 2]
        for block in range(first, stop):
            part = layout.between(block, block + 1)
            content = bytearray(block_bytes)
            for source, offset, at, size in zip(
                layout.source[part],
                layout.offset[part],
                layout.at[part],
                layout.size[part],
                strict=True,
            ):
                content[at : at + size] = sources[source][offset : offset + size]
            blocks += content[: int(layout.size[part].sum())]
            assert len(blocks) == min(file.size_bytes, (block + 1 - first) * block_bytes)
        assert blocks == file.header + b"".join(pieces[row].data.tobytes() for row in rows)
