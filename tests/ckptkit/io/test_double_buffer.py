"""Blocks are loaded in their order, one ahead, into two buffers; a failure of a load is raised where it is taken."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.io.blocks import Bytes
from ckptkit.io.double_buffer import ahead, double_buffered


def test_a_file_comes_in_blocks_whose_memory_is_used_again_two_later() -> None:
    content, seen, starts, addresses, done = bytes(range(100)), b"", [], [], []

    def load(start: int, block: Bytes) -> None:
        starts.append(start)
        block[:] = bytearray(content[start : start + len(block)])

    for [(address, size)] in double_buffered(load, 100, 32, done.append):
        addresses.append(int(address))
        seen += ctypes.string_at(int(address), int(size))
    assert seen == content
    assert starts == [0, 32, 64, 96]
    assert done == [32, 32, 32, 4]
    assert addresses[:2] == addresses[2:]
    assert addresses[0] != addresses[1]


@pytest.mark.parametrize("size_bytes", [0, 1])
def test_a_file_of_nothing_has_no_block(size_bytes: int) -> None:
    assert len(list(double_buffered(lambda start, block: block.fill(7), size_bytes, 32))) == size_bytes


def test_the_next_one_is_made_while_one_is_used_and_no_more() -> None:
    begun = [threading.Event() for _ in range(3)]

    def make(number: int) -> int:
        begun[number].set()
        return number

    with ThreadPoolExecutor(1) as pool:
        made = ahead(make, iter(range(3)), pool)
        assert next(made) == 0
        assert begun[1].wait(60)
        assert not begun[2].is_set()
        assert list(made) == [1, 2]


def test_a_failure_is_raised_where_its_block_is_taken() -> None:
    def load(start: int, block: Bytes) -> None:
        if start:
            raise ValueError("no second block")

    blocks = double_buffered(load, 100, 60)
    next(blocks)
    with pytest.raises(ValueError, match="no second block"):
        next(blocks)
