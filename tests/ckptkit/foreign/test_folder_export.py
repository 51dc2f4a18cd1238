"""Files of an export as pieces: blocks of any size have the same bytes, and zeros where no piece is."""

import numpy as np
import pytest

from ckptkit.foreign.folder_export import FilePiece, load_pieces


def piece_of(begin: int, data: bytes) -> FilePiece:
    return FilePiece.of_bytes(begin, len(data), lambda: data)


@pytest.mark.parametrize("block_bytes", [1, 3, 7, 64])
def test_blocks_of_any_size_have_pieces_and_zeros_between_them(block_bytes: int) -> None:
    pieces = [piece_of(2, b"abc"), piece_of(5, b"d"), piece_of(9, b"efghi")]
    whole = bytearray()
    for start in range(0, 16, block_bytes):
        block = np.full(min(block_bytes, 16 - start), 255, np.uint8)
        load_pieces(pieces, start, block)
        whole += block.tobytes()
    assert whole == b"\0\0abcd\0\0\0efghi\0\0"
