"""Ranks as threads of one process, of which one at a time runs: a network for many ranks without a launcher.

A rank runs until it must wait for others; then the next that can go on does: see `turns`. So the order of everything
is always the same, threads never fight for the interpreter, and when no rank can go on that is an error at once. Sums
are in order of rank. A send is waited for until it was received, and read only then, as NCCL may.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trainer.verify.turns import Deadlock as Deadlock
from trainer.verify.turns import Died, FirstCome, Transfer, Turns

_wrapped: dict[tuple[type, str], tuple[int, Any]] = {}  # how many ranks wrap a method, and what it was


@contextmanager
def wrapped(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap a method, by a rank among others that do; the last one to leave undoes it for all.

    Ranks leave in any order: if each put back what it had found, the wrapper of another would stay.
    """
    num_ranks, real = _wrapped.get((owner, name), (0, getattr(owner, name)))
    _wrapped[owner, name] = num_ranks + 1, real
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        num_ranks, _ = _wrapped.pop((owner, name))
        if num_ranks > 1:
            _wrapped[owner, name] = num_ranks - 1, real
        else:
            setattr(owner, name, real)


def run_threads(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(rank, *arguments, network=...) on every rank; return the results in order of rank.

    The first error of a rank ends all of them and is raised.
    """
    turns = Turns(names_of(num_ranks), FirstCome())
    meetings: dict[Any, ThreadGroup] = {}
    return run_turns(
        turns,
        [
            partial(function, rank, *arguments, network=Threads(turns, meetings, rank, num_ranks))
            for rank in range(num_ranks)
        ],
    )


def names_of(num_ranks: int) -> list[str]:
    """Return how errors name ranks."""
    return [f"rank {rank}" for rank in range(num_ranks)]


def run_turns(turns: Turns, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function on a thread of its own, in turns; return their results, None of one that died.

    The first error ends all of them and is raised; of a death that nobody waited for it is Died.
    """
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        turns.begin(number)
        try:
            torch.set_num_threads(1)
            turns.raise_if_stopped()
            results[number] = functions[number]()
        except Died as death:
            turns.bury(number, death)
        except BaseException as error:
            turns.stop(error)
        finally:
            turns.end(number)

    threads = [threading.Thread(target=run, args=(number,), name=name) for number, name in enumerate(turns.names)]
    for thread in threads:
        thread.start()
    turns.pass_on()
    for thread in threads:
        thread.join()
    if turns.error is not None:
        raise turns.error
    if turns.dead:
        raise Died("; ".join(turns.dead.values()))
    return results


class ThreadGroup:
    """What the transports of one group share."""

    def __init__(self) -> None:
        self.collectives: dict[int, Transfer] = {}
        self.sent: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)


class Threads:
    """The network of one rank."""

    def __init__(self, turns: Turns, meetings: dict[Any, ThreadGroup], rank: int, world_size: int) -> None:
        self.turns, self._meetings, self.rank = turns, meetings, rank
        self._numbers, self.world_size = count(), world_size

    def note(self, kind: str, stage: int, microbatch: int) -> None:
        """Note which action the rank is at, as an executor does; "" behind the last."""
        place = "the update" if kind == "U" else f"{kind}, stage {stage}, micro-batch {microbatch}"
        self.turns.places[self.rank] = place if kind else ""

    def connect(self, name: str, ranks: Sequence[int]) -> "ThreadTransport | None":
        place = (next(self._numbers), name, tuple(ranks))
        if self.rank not in ranks:
            return None
        return ThreadTransport(self.turns, self._meetings.setdefault(place, ThreadGroup()), place, self.rank)


class ThreadTransport:
    """One rank's end of a group."""

    def __init__(self, turns: Turns, meeting: ThreadGroup, place: tuple[int, str, tuple[int, ...]], rank: int) -> None:
        self._turns, self._meeting, self._rank = turns, meeting, rank
        _, self._name, self._ranks = place
        self._index = self._ranks.index(rank)
        self._numbers = count()

    def all_reduce(self, tensor: Tensor, op: str, *, is_async: bool) -> "ThreadHandle | None":
        return self._join(all_reduce, tensor, op, is_async=is_async)

    def broadcast(self, tensor: Tensor, source: int, *, is_async: bool) -> "ThreadHandle | None":
        return self._join(broadcast, tensor, source, is_async=is_async)

    def reduce_scatter(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> "ThreadHandle | None":
        return self._join(reduce_scatter, flat, is_async=is_async, share=share)

    def all_gather(self, flat: Tensor, share: Tensor | None = None, *, is_async: bool) -> "ThreadHandle | None":
        return self._join(all_gather, flat, is_async=is_async, share=share)

    def all_gather_coalesced(self, flats: Any, shares: Any, *, is_async: bool) -> "SeveralHandles | None":
        pairs = zip(flats, shares, strict=True)
        several = SeveralHandles([self._join(all_gather, flat, is_async=True, share=share) for flat, share in pairs])
        if is_async:
            return several
        several.wait()
        return None

    def all_to_all(
        self, received: Tensor, flat: Tensor, to_each: Any = None, from_each: Any = None, *, is_async: bool
    ) -> "ThreadHandle | None":
        if to_each is None:
            return self._join(all_to_all, received, is_async=is_async, share=flat)
        return self._join(exchange, received, is_async=is_async, share=flat, sizes=(to_each, from_each))

    def send(self, tensor: Tensor, to: int) -> "ThreadHandle":
        sent = Transfer(f"a send to rank {self._ranks[to]} by {self._name}", tensor)
        return self._meet(sent, self._meeting.awaited, self._meeting.sent, (self._index, to))

    def receive(self, tensor: Tensor, source: int) -> "ThreadHandle":
        awaited = Transfer(f"a receive from rank {self._ranks[source]} by {self._name}", tensor)
        return self._meet(awaited, self._meeting.sent, self._meeting.awaited, (source, self._index))

    def _meet(self, own_transfer: Transfer, others: Any, own: Any, way: tuple[int, int]) -> "ThreadHandle":
        self._turns.call(self._rank, own_transfer.what)
        if others[way]:
            other = others[way].popleft()
            other.check(own_transfer)
            source, target = (other, own_transfer) if others is self._meeting.sent else (own_transfer, other)
            self._turns.finish([other, own_transfer], partial(copy, target.tensor, source.tensor), (self._meeting, way))
        else:
            begun = "a receive was begun before its send" if own is self._meeting.awaited else "a send waited"
            self._turns.seen[begun] += 1
            own[way].append(own_transfer)
        return ThreadHandle(self._turns, self._rank, own_transfer)

    def _join(
        self,
        carry: Callable[..., None],
        tensor: Tensor,
        *arguments: Any,
        is_async: bool,
        share: Tensor | None = None,
        sizes: tuple[Any, Any] | None = None,
    ) -> "ThreadHandle | None":
        """Join the others' call; of an uneven exchange each rank has sizes of its own."""
        number = next(self._numbers)
        mine = Transfer(f"{carry.__name__} {number} of {self._name} {self._ranks}", tensor, arguments)
        self._turns.call(self._rank, mine.what)
        if sizes is not None:
            mine.form = (mine.what, tensor.dtype)
        collective = self._meeting.collectives.setdefault(number, mine)
        collective.check(mine)
        if share is None and carry in (reduce_scatter, all_gather):
            share = tensor.chunk(len(self._ranks))[self._index]
        collective.joined[self._index] = (tensor, share) if sizes is None else (tensor, (share, *sizes))
        if len(collective.joined) == len(self._ranks):
            joined = zip(*(collective.joined[index] for index in range(len(self._ranks))), strict=True)
            del self._meeting.collectives[number]
            if self._index + 1 < len(self._ranks):
                self._turns.seen["a lower rank was the last to join"] += 1
            self._turns.finish([collective], partial(torch.no_grad()(carry), *joined, *arguments), self._meeting)
        handle = ThreadHandle(self._turns, self._rank, collective)
        if is_async:
            return handle
        handle.wait()
        return None


class ThreadHandle:
    """A transfer that one rank may wait for."""

    def __init__(self, turns: Turns, rank: int, transfer: Transfer) -> None:
        self._turns, self._rank, self._transfer = turns, rank, transfer

    def wait(self) -> None:
        self._turns.call(self._rank, f"a wait for {self._transfer.what}")
        self._turns.wait(self._rank, self._transfer)


class SeveralHandles:
    """Transfers that are waited for together."""

    def __init__(self, handles: Sequence["ThreadHandle | None"]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.wait()


Tensors = Sequence[Tensor]  # one a rank


@torch.no_grad()
def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def all_reduce(tensors: Tensors, shares: Any, op: str) -> None:
    total = reduced(tensors, op)
    for tensor in tensors:
        tensor.copy_(total)


def broadcast(tensors: Tensors, shares: Any, source: int) -> None:
    for tensor in tensors:
        tensor.copy_(tensors[source])


def reduce_scatter(tensors: Tensors, shares: Tensors) -> None:
    """Leave each rank its share of the sum, and poison what it does not own."""
    sums = reduced(tensors, "sum").chunk(len(tensors))
    for tensor, share, own in zip(tensors, shares, sums, strict=True):
        tensor.fill_(torch.nan)
        share.copy_(own)


def all_gather(tensors: Tensors, shares: Tensors) -> None:
    whole = torch.cat([share.view(-1) for share in shares])
    for tensor in tensors:
        tensor.copy_(whole.view_as(tensor))


def all_to_all(tensors: Tensors, shares: Tensors) -> None:
    for index, tensor in enumerate(tensors):
        tensor.copy_(torch.cat([flat.chunk(len(shares))[index] for flat in shares]))


def exchange(tensors: Tensors, shares: Sequence[tuple[Tensor, list[int], list[int]]]) -> None:
    """Bring each rank the rows of the others, whose numbers are those that it awaits."""
    for index, (tensor, (_, _, from_each)) in enumerate(zip(tensors, shares, strict=True)):
        parts = [flat.split(to_each)[index] for flat, to_each, _ in shares]
        if [len(part) for part in parts] != list(from_each):
            raise RuntimeError(f"place {index} awaits rows {from_each}, and is sent {[len(part) for part in parts]}")
        tensor.copy_(torch.cat(parts))


def reduced(tensors: Tensors, op: str) -> Tensor:
    """Return the tensors' sum or maximum, in order of rank."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == "sum":
            total += tensor
        else:
            torch.maximum(total, tensor, out=total)
    return total
