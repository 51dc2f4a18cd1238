"""Calls for tokens in a pass: how long they take beyond what is multiplied beside them, and how long the host.

The host of a run that makes many small calls is what its step waits for: each takes it as long as some kernels.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.plan.rates import Rates
from trainer.plan.trace import Move
from trainer.plan.volumes import Volumes


@dataclass(frozen=True, slots=True)
class TokenCalls:
    """The calls of a layer and of the ends, with the size of each group and how far it reaches.

    If weights' products are put off, as `puts_off` says, no call is beside one.
    """

    volumes: Volumes
    rates: Rates
    places: Mapping[str, tuple[int, int]]
    puts_off: bool

    def exposed_s(self, part: str, way: str, operations_s: float) -> float:
        """Return how long pass F or B of a part waits for its calls; products have so many operations a second."""
        total = 0.0
        for move, count in self._moves(part, way).items():
            num_ranks, span = self.places[move.group]
            call_s = self.rates.call_s(move.kind, move.num_bytes, num_ranks, span)
            beside = move.beside + move.beside_w * (not self.puts_off)
            place = float(move.num_bytes), num_ranks
            hidden_s = self.rates.hidden_s(move.kind, place, call_s, beside / operations_s) if beside else 0.0
            total += count * (call_s - hidden_s)
        return total

    def host_s(self, part: str, way: str) -> float:
        """Return what the host takes for the calls of a pass."""
        return self._moves(part, way).total() * self.rates.call_host_s()

    def _moves(self, part: str, way: str) -> Counter[Move]:
        moves = self.volumes.layer if part == "layer" else self.volumes.ends
        return Counter({move: count for move, count in moves.items() if (move.way == "F") == (way == "F")})
