"""Pickled data for programs that read nothing else, written opcode by opcode: no class that it names is needed here."""

import struct
from collections.abc import Iterable, Iterator
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
    match value:
        case None | bool():
            yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int() if -(1 << 31) <= value < 1 << 31:
            yield b"J" + struct.pack("<i", value)
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            yield b"\x8a" + bytes([len(data)]) + data
        case str():
            text = value.encode()
            yield b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            yield from (b"(", *_all_opcodes(value), b"t")
        case list():
            yield from (b"](", *_all_opcodes(value), b"e")
        case dict():
            yield from _opcodes(Pairs(list(value.items())))
        case Pairs():
            yield from (b"}(", *_all_opcodes(item for pair in value.items for item in pair), b"u")
        case Global():
            yield f"c{value.module}\n{value.name}\n".encode()
        case Call():
            yield from (*_opcodes(value.function), *_opcodes(value.args), b"R")
        case Made(state=None):
            yield from (*_opcodes(value.kind), b")\x81")
        case Made():
            yield from (*_opcodes(Made(value.kind)), *_opcodes(value.state), b"b")
        case External():
            yield from (*_opcodes(value.pid), b"Q")
        case _:
            raise AssertionError(f"a {type(value).__name__} is not written")


def _all_opcodes(values: Iterable[Any]) -> Iterator[bytes]:
    return (opcode for value in values for opcode in _opcodes(value))
