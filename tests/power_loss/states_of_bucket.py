"""What may go wrong with the requests of a program: every fault of every request, and several at random."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from threefold.storage.wrapping import Request

AT_END = float("inf")
LISTINGS = ("list", "list_keys")


@dataclass(frozen=True)
class Fault:
    """One request is killed with its program, refused, lost (served without an answer), served late, or stale.

    `after` is the number of requests before a late one is served, or of the last keys that a stale listing leaves out.
    With `is_final` a refused request is not tried again, and a lost one gets no answer however often it is repeated.
    """

    kind: str
    after: float = 0
    is_final: bool = False


def faults_of(request: Request) -> Iterator[Fault]:
    """Yield all that may go wrong with a request."""
    yield Fault("kill")
    for is_final in (False, True):
        yield Fault("refused", is_final=is_final)
        if request.operation in ("write", "delete", "copy", "part"):
            yield Fault("lost", is_final=is_final)
        if request.operation == "write":
            yield from (Fault("late", after, is_final) for after in (1, 4, AT_END))
    if request.operation in LISTINGS:
        yield from (Fault("stale", number) for number in (1, 2, 4))


def single_faults(requests: Sequence[Request]) -> Iterator[Mapping[int, Fault]]:
    """Yield every fault of every request of a program, alone."""
    for number, request in enumerate(requests):
        for fault in faults_of(request):
            yield {number: fault}


def random_faults(requests: Sequence[Request], count: int, seed: int = 0) -> Iterator[Mapping[int, Fault]]:
    """Yield so many draws of two to four faults; a request after the first may be another one than it was."""
    rng = random.Random(seed)
    for _ in range(count):
        numbers = rng.sample(range(len(requests)), min(rng.randint(2, 4), len(requests)))
        yield {number: rng.choice([*faults_of(requests[number])]) for number in numbers}
