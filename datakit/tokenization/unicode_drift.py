"""Unicode drift: the characters that a newer Unicode knows and an older one does not, so that two engines may differ.

What is a letter, a number or a combining mark decides where text is split and how it is normalized. Engines carry
tables of their own, from Unicode 10 (the marks in tokenizers' normalizers) to 17. All other characters have had
the same properties since.
"""

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

_NUM_CODES, _LOOKED_UP = 0x110000, ((0, 0x20000), (0xE0000, 0xE1000))
_IDEOGRAPHS = (
    "20000-2a6df 2a700-2b738 2b740-2b81d 2b820-2cea1 2ceb0-2ebe0 2f800-2fa1d 30000-3134a"  # assigned by Unicode 14
)
_PIECE_CHARACTERS = 1 << 12
# New since Unicode 10 and a mark with a class, or new since Unicode 16 and a letter, mark or number.
_NEWER = (
    "7fd 88f 897-89f 8ca-8d3 9fe c3c c5c cdc d3b-d3c eba 1715 1abf-1add 1ae0-1aeb 1df6-1dfa a7ce-a7cf a7d2 a7d4 a7f1 "
    "a82c 10940-10959 10d24-10d27 10d69-10d6d 10eab-10eac 10ec5-10ec7 10efa-10eff 10f46-10f50 10f82-10f85 11070 "
    "1133b 113ce-113d0 1145e 11839-1183a 11938 1193d-1193e 11943 119e0 11a34 11a47 11a99 11b60-11b67 11d42-11d45 "
    "11d97 11db0-11ddb 11de0-11de9 11f41-11f42 1612f 16ea0-16ed3 16ff0-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2 1e08f "
    "1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef 1e6c0-1e6ff 2b73a-2b73f 2cea2-2cead 323b0-33479"
)


def has_drift(text: str) -> bool:
    """Return whether a text holds such a character, or one that is assigned in no Unicode that Python knows."""
    if text.isascii():
        return False
    table = _table()
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        if not piece.isascii() and table[np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), "<u4")].any():
            return True
    return False


@cache
def _table() -> npt.NDArray[np.bool_]:
    """Return for every code point whether it drifts; 1 MiB, made in some 10 ms."""
    table = np.ones(_NUM_CODES, np.bool_)
    for start, stop in _LOOKED_UP:
        table[start:stop] = [unicodedata.category(chr(code)) == "Cn" for code in range(start, stop)]
    table[0xF0000:] = False  # for private use
    for entries, drifts in ((_IDEOGRAPHS, False), (_NEWER, True)):
        for entry in entries.split():
            first, _, last = entry.partition("-")
            table[int(first, 16) : int(last or first, 16) + 1] = drifts
    return table
