"""Pickled data for programs that read nothing else, written opcode by opcode: no class that it names is needed here."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A class, function or constant of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a function or class returns for some arguments."""

    function: Global
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """An object of a class, made without a call of it, and the state that it is given."""

    kind: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class External:
    """An object that the reader finds elsewhere by this."""

    pid: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict of keys that are not hashable here."""

    items: list[tuple[Any, Any]]


def pickled(value: Any) -> bytes:
    """Return data of protocol 2: None, bool, int, str, tuple, list and dict, and what is above."""
    return b"\x80\x02" + b"".join(_opcodes(value)) + b"."


def _opcodes(value: Any) -> Iterator[bytes]:
    if value is None or isinstance(value, bool):
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, str):
        text = value.encode()
        yield b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, tuple):
        yield b"("
        yield from (each for item in value for each in _opcodes(item))
        yield b"t"
    elif isinstance(value, list):
        yield b"]("
        yield from (each for item in value for each in _opcodes(item))
        yield b"e"
    elif isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value.items
        yield b"}("
        yield from (each for pair in pairs for item in pair for each in _opcodes(item))
        yield b"u"
    elif isinstance(value, Global):
        yield f"c{value.module}\n{value.name}\n".encode()
    elif isinstance(value, Call):
        yield from (*_opcodes(value.function), *_opcodes(value.args), b"R")
    elif isinstance(value, Made):
        yield from (*_opcodes(value.kind), b")\x81")
        if value.state is not None:
            yield from (*_opcodes(value.state), b"b")
    elif isinstance(value, External):
        yield from (*_opcodes(value.pid), b"Q")
    else:
        raise AssertionError(f"a {type(value).__name__} is not written")


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
