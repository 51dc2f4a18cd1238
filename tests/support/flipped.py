"""FlippedStorage: a storage behind a network, one of whose answers has a flipped bit or ends early."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from threefold.storage import Buffer, Storage
from threefold.storage.contract import CutShort
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")
READS = ("read", "read_ranges")


class FlippedStorage(WrappingStorage):
    """Another storage; of its reads number `at` is spoiled, at a part of its bytes, and no other."""

    def __init__(self, storage: Storage, at: int = -1, *, part: float = 0.5, cuts: bool = False) -> None:
        super().__init__(storage)
        self.reads = list[str]()  # shared with the same storage seen afresh
        self._at, self._part, self._cuts = at, part, cuts
        self.within = storage

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        result = work()
        if request.operation not in READS:
            return result
        self.reads.append(request.keys[0])
        if len(self.reads) - 1 != self._at:
            return result
        if self._cuts:
            raise CutShort(f"{self.url}/{request.keys[0]} ends at byte 1")
        if isinstance(result, list):
            return self._spoiled_parts(result)  # type: ignore[return-value]
        return self._spoiled(result)  # type: ignore[return-value,arg-type]

    def _spoiled_parts(self, parts: Sequence[Buffer]) -> list[Buffer]:
        longest = max(range(len(parts)), key=lambda number: len(parts[number]))
        return [self._spoiled(part) if number == longest else part for number, part in enumerate(parts)]

    def _spoiled(self, data: Buffer) -> bytes:
        content = bytearray(data)
        if content:
            content[min(int(len(content) * self._part), len(content) - 1)] ^= 4
        return bytes(content)
