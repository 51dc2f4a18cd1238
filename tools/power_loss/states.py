"""The trees that a loss of power may leave, at any moment of a recording, by what a file system promises."""

import hashlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.power_loss.disk import Recording, Tree

AGE_S = 2 * 86_400.0  # of a tree: a machine is not back at once
MODELS = {
    "weakest": "every change that is not durable is kept or lost by itself",
    "hosts": "one of several hosts is lost once it has made its changes, and with it, each by itself, those that are "
    "not durable; the others go on to their end, on what they saw of it",
    "journal": "entries are kept up to some moment, in the order of their changes, as by ext4 and XFS; data by itself",
}


@dataclass(frozen=True, slots=True)
class State:
    """What may be there after a loss of power at a moment: the changes that were kept, by their numbers, in order."""

    moment: int
    changes: tuple[int, ...]
    promises: tuple[str, ...]  # each once, sorted


def states(
    recording: Recording, model: str, *, num_random: int = 0, seed: int = 0, beyond: Recording | None = None
) -> Iterator[State]:
    """Draw the states of every moment, each once: all of those with one change lost or one kept, and some others.

    Those that `beyond`, the same recording with more fsyncs, may leave too are passed over, but for a lost host's. Then
    the last moments come first: most was promised by then.
    """
    if model == "hosts":
        yield from _without_a_host(recording, num_random, random.Random(seed))
        return
    rng, seen = random.Random(seed), set[tuple[tuple[int, ...], int]]()
    durable_at = _durable_at(recording, model)
    durable_there = durable_at if beyond is None else _durable_at(beyond, model)
    moments = sorted(
        {moment for each in (*recording.changes, *recording.syncs) for moment in (each.began, each.ended)}
        | {moment for moment, *_ in recording.promises},
        reverse=beyond is not None,
    )
    for moment in moments:
        began = [number for number, change in enumerate(recording.changes) if change.began <= moment]
        sure = frozenset(number for number in began if durable_at[number] <= moment)
        unsure = [number for number in began if number not in sure]
        sure_there = {number for number in unsure if durable_there[number] <= moment}
        if beyond and not sure_there:
            continue
        promises = _told_apart(text for since, text, _ in recording.promises if since <= moment)
        draw = _weakest if model == "weakest" else _journal
        for chosen in draw(recording, unsure, num_random, rng):
            if beyond and sure_there <= chosen:
                continue
            numbers = tuple(number for number in began if number in sure or number in chosen)
            if (numbers, len(promises)) not in seen:
                seen.add((numbers, len(promises)))
                yield State(moment, numbers, promises)


def _durable_at(recording: Recording, model: str) -> tuple[float, ...]:
    return recording.in_journal_at if model == "journal" else recording.durable_at


def _told_apart(texts: Iterable[str]) -> tuple[str, ...]:
    """Return each promise once, in an order that is the same whoever was first to make it."""
    return tuple(sorted({*texts}))


def _weakest(
    recording: Recording, unsure: Sequence[int], num_random: int, rng: random.Random
) -> Iterator[frozenset[int]]:
    everything = frozenset(unsure)
    yield from (everything, frozenset())
    for number in unsure:
        yield everything - {number}
        yield frozenset((number,))
    if len(unsure) > 2:
        for _ in range(num_random):
            yield frozenset(number for number in unsure if rng.random() < 0.5)


def _without_a_host(recording: Recording, num_random: int, rng: random.Random) -> Iterator[State]:
    """Draw the states in which one host is lost at some moment after its last change, and the others come to their end.

    What the others do then is what they did, as all that they saw of the host had been there.
    """
    everything = frozenset(range(len(recording.changes)))
    for host in sorted({change.host for change in recording.changes} - {""}):
        own = [number for number, change in enumerate(recording.changes) if change.host == host]
        last = max(recording.changes[number].ended for number in own)
        syncs = [sync for sync in recording.syncs if sync.host == host]
        for moment in sorted({last} | {at for sync in syncs for at in (sync.began, sync.ended) if at > last}):
            others = tuple(sync for sync in recording.syncs if sync.host != host or sync.ended <= moment)
            durable_at = replace(recording, syncs=others).durable_at
            unsure = [number for number in own if durable_at[number] == math.inf]
            promises = _told_apart(text for at, text, of in recording.promises if of != host or at <= moment)
            for chosen in _weakest(recording, unsure, num_random, rng):
                yield State(moment, tuple(sorted(everything - {*unsure} | chosen)), promises)


def _journal(
    recording: Recording, unsure: Sequence[int], num_random: int, rng: random.Random
) -> Iterator[frozenset[int]]:
    names = [number for number in unsure if recording.changes[number].entries]
    data = frozenset(unsure) - frozenset(names)
    for count in range(len(names) + 1):
        first = frozenset(names[:count])
        yield from (first | data, first)
    everything = frozenset(names)
    for number in data:
        yield everything | data - {number}
        yield everything | {number}
    if data:
        for _ in range(num_random):
            first = frozenset(names[: rng.randint(0, len(names))])
            yield first | {number for number in data if rng.random() < 0.5}


@dataclass(frozen=True, slots=True)
class Tally:
    """How many states were drawn, how many trees they are, and what is wrong with some, each with its first moment."""

    num_states: int
    num_trees: int
    faults: dict[str, int]


Check = Callable[[Path, Sequence[str]], str]  # a folder, and what had been promised: what is wrong with it, or nothing


def explore(
    recording: Recording,
    model: str,
    check: Check,
    folder: Path,
    *,
    num_random: int = 0,
    seed: int = 0,
    stops_at_fault: bool = False,
    beyond: Recording | None = None,
) -> Tally:
    """Check every tree that a loss of power may leave, each once for what had been promised.

    Each is made where the folder was recorded, as of two days ago, and should be in memory. Those that the recording
    `beyond` may leave too are passed over.
    """
    num_states, seen, faults = 0, set[bytes](), dict[str, int]()
    for state in states(recording, model, num_random=num_random, seed=seed, beyond=beyond):
        num_states += 1
        tree = recording.tree(state.changes)
        key = _key(tree, state.promises)
        if key in seen:
            continue
        seen.add(key)
        shutil.rmtree(folder)
        make(tree, folder)
        fault = check(folder, state.promises)
        if fault:
            faults.setdefault(fault, state.moment)
            if stops_at_fault:
                break
    return Tally(num_states, len(seen), faults)


def _key(tree: Tree, promises: Sequence[str]) -> bytes:
    digest = hashlib.blake2b(repr(promises).encode())
    for path in sorted(tree):
        content = tree[path]
        digest.update(path.encode() + b"\0")
        if content is not None:
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def make(tree: Tree, folder: Path) -> None:
    """Make a tree in a folder that is not there yet, as it was two days ago."""
    folder.mkdir()
    then = time.time() - AGE_S
    for path, content in tree.items():
        if content is None:
            os.mkdir(f"{folder}/{path}")
        else:
            with open(f"{folder}/{path}", "wb", buffering=0) as file:
                file.write(content)
    for path in reversed(tree):
        os.utime(f"{folder}/{path}", (then, then))
