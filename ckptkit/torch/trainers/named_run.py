"""NamedRun: a run whose steps go by the names of another program, as one process saves them.

A step is saved once, whatever the number of its names. What differs under a further name, such as the state of
callbacks and loops, is kept with that name; weights and states of optimizers of one step are the same under all.
A step goes when its last name goes, after the save that takes its place is committed and slower tiers have it. Many
processes may load; what they find damaged is set aside by the one that saves, before it does.

Its StepNames are kept in the run as `names.json`. While a save runs, a name that it takes over means the step before it
too: if the save fails, or the process dies, that one counts.
"""

import base64
import json
from collections.abc import Callable
from contextlib import suppress
from shlex import quote
from typing import Any

import torch

from ckptkit.format.state_tree import Encoder, Node, decoded
from ckptkit.loading.exchange import Alone
from ckptkit.runs.fallback import Candidate, set_aside
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.run import Run
from ckptkit.torch.state.boxes import dtype_of
from threefold.cli import log
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.installing import NEWER
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.second_look import read_checked

NAMES_KEY, VERSION = "names.json", 1
Parts = dict[str, Any]  # JSON by key of the state; None for a key that is not there
Meaning = tuple[int, Parts]
KEY = "checkpoint"
LARGE = ("state_dict", "optimizer_states")  # the same under all names of a step
MAX_PART_BYTES, NUM_REMEMBERED = 1 << 20, 4


class StepNames:
    """The names of a run's steps, read once; `write` keeps changes."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._meanings: dict[str, list[Meaning]] = {}  # oldest first
        self._dropped: dict[str, int | None] = {}  # names that end, and the step whose commit they wait for
        self._written = self._read()

    def add(self, name: str, step: int, parts: Parts) -> None:
        """Let a name mean a step from the step's commit on."""
        others = [meaning for meaning in self._meanings.get(name, []) if meaning[0] != step]
        self._meanings[name] = [*others, (step, parts)]
        self._dropped.pop(name, None)

    def drop(self, name: str, after: int | None) -> bool:
        """End a name once a step is committed, None for at once; return False if it is none."""
        if name not in self._meanings:
            return False
        self._dropped[name] = after
        return True

    def meaning(self, name: str, is_committed: Callable[[int], bool]) -> Meaning | None:
        """Return what a name means, None if it is none."""
        return next((each for each in reversed(self._meanings.get(name, [])) if is_committed(each[0])), None)

    def steps(self) -> set[int]:
        """Return the steps that have names."""
        return {step for meanings in self._meanings.values() for step, _ in meanings}

    def settle(self, is_committed: Callable[[int], bool], running: int | None) -> tuple[list[int], list[str]]:
        """Forget what is over, but for the step that a save runs for.

        Return the steps that lost their last name, and the names that stay although they were dropped: the save that
        was to take their place failed.
        """
        before, staying = self.steps(), list[str]()
        for name, after in [*self._dropped.items()]:
            if after is not None and after == running:
                continue
            del self._dropped[name]
            if after is None or is_committed(after):
                del self._meanings[name]
            else:
                staying.append(name)
        for name, meanings in [*self._meanings.items()]:
            past = [meaning for meaning in meanings if meaning[0] != running and is_committed(meaning[0])]
            left = [*past[-1:], *(meaning for meaning in meanings if meaning[0] == running)]
            self._meanings[name] = left
            if not left:
                del self._meanings[name]
                self._dropped.pop(name, None)
        return sorted(before - self.steps()), staying

    def write(self) -> None:
        """Keep the names in the run, if they changed."""
        text = json.dumps({"version": VERSION, "names": self._meanings, "dropped": self._dropped}).encode() + b"\n"
        if text != self._written:
            self._storage.write(NAMES_KEY, text)
            self._written = text

    def _read(self) -> bytes:
        if self._storage.info(NAMES_KEY) is None:
            return b""
        return read_checked(self._storage, f"{self._storage.url}/{NAMES_KEY}", self._parsed)

    def _parsed(self, storage: Storage) -> bytes:
        text, place = storage.read(NAMES_KEY), f"{self._storage.url}/{NAMES_KEY}"
        try:
            document = json.loads(text)
            version = document["version"]
            if version == VERSION:
                names = document["names"].items()
                self._meanings = {str(name): [(int(step), dict(parts)) for step, parts in of] for name, of in names}
                self._dropped = {str(name): after for name, after in document["dropped"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            hint = f"rm {quote(place)}" if local_root(storage) else f"remove {place}"
            raise CheckFailed(f"{place} is damaged, and no step with it", hint=hint) from None
        if version != VERSION:
            raise UserError(f"{place} is of version {version!r}, this program reads {VERSION}", hint=NEWER)
        return text


class NamedRun:
    """A run and the names of its steps, for the one process that saves; `close` lets go of the writer."""

    def __init__(self, url: Any, options: CheckpointerOptions) -> None:
        self._url, self._options = url, options
        self._opened: Run | None = None
        self._names: StepNames | None = None
        self._own: set[int] = set()  # the steps that this process saved or loaded
        self._parts: dict[int, Parts] = {}  # the small parts of the last of them
        self._committed: set[int] = set()  # steps that were, though they may be removed by now
        self._newest: int | None = None  # that this process saved
        self._damaged: tuple[Candidate, ...] = ()  # the steps that a load passed over
        self._nameless: set[int] = set()  # steps that slower tiers still copy

    @property
    def run(self) -> Run:
        """Return the run, opened at first use."""
        if self._opened is None:
            self._opened = Run(self._url, self._options, exchange=Alone())
        return self._opened

    @property
    def names(self) -> StepNames:
        """Return the names, read at first use."""
        if self._names is None:
            self._names = StepNames(self.run.storage)
        return self._names

    def set_damaged_aside(self) -> None:
        """Set the steps aside that a load passed over; the process that saves calls it before it does."""
        damaged, self._damaged = self._damaged, ()
        set_aside(damaged, log)

    def save(self, name: str, step: int, state: dict[str, Any]) -> list[str]:
        """Save a state as a step under a name, or add a name to the step; return names that stay as a save failed."""
        self.set_damaged_aside()
        parts = small_parts(state)
        if step in self._own and (step == self._running() or self.run.is_committed(step)):
            known = self._parts.get(step, {})
            differing = {key: parts.get(key) for key in {**known, **parts} if known.get(key) != parts.get(key)}
            self.names.add(name, step, differing)
        else:
            self.run.save(step, {KEY: state})
            self._committed.discard(step)
            self._newest = step
            self._remember(step, parts)
            self.names.add(name, step, {})
        return self._settle()

    def is_taken(self, step: int) -> bool:
        """Return whether a step is there that this process neither saved nor loaded."""
        return step not in self._own and self.run.is_committed(step)

    def is_running(self, step: int) -> bool:
        """Return whether a save of a step runs."""
        return step == self._running()

    def drop(self, name: str) -> bool:
        """End a name, and remove its step if that was the last one; return False if it was not a name."""
        newest = self._newest
        is_safe = newest is None or (newest != self._running() and self._is_committed(newest))
        was_name = self.names.drop(name, None if is_safe else newest)
        self._settle()
        return was_name

    def load(self, step: int | None, parts: Parts | None = None) -> dict[str, Any]:
        """Return the state of a step, None for the newest sound one, with the parts of a name."""
        filled: dict[str, Any] = {KEY: {}}
        report = self.run.load(filled, step, sets_aside=False)
        self._damaged = report.damaged if step is None else ()
        state = dict(filled[KEY])
        self._remember(report.step, small_parts(state))
        for key, part in (parts or {}).items():
            if part is None:
                state.pop(key, None)
            else:
                state[key] = unpacked(part)
        return state

    def find(self, name: str, step: int | None = None) -> tuple[int, Parts] | None:
        """Return the step and the parts that a name means, if that is the step given; None if it means nothing."""
        if self._running() is not None:
            with suppress(StorageError):  # which was logged, and of which an earlier meaning is left
                self.run.wait()
        meaning = self.names.meaning(name, self.run.is_committed)
        return meaning if meaning is not None and step in (None, meaning[0]) else None

    def close(self) -> list[str]:
        """Wait for the last save; return names that stay as a save failed."""
        if self._opened is None:
            return []
        try:
            self._opened.close()
        finally:
            kept = self._settle() if self._names is not None else []
            self._opened = self._names = None
        return kept

    def _running(self) -> int | None:
        """Return the step that a save runs for."""
        return self._newest if self._opened is not None and self._opened.is_saving else None

    def _settle(self) -> list[str]:
        steps, staying = self.names.settle(self._is_committed, self._running())
        copied = self.run.copied_steps
        going = {*steps, *self._nameless} - self.names.steps()
        self._nameless = going & copied
        for step in sorted(going - copied):
            self._remove(step)
        self.names.write()
        return staying

    def _is_committed(self, step: int) -> bool:
        if step not in self._committed and self.run.is_committed(step):
            self._committed.add(step)
        return step in self._committed

    def _remove(self, step: int) -> None:
        """Remove a step; what is gone, or pinned, is left."""
        try:
            if self.run.is_committed(step):
                self.run.remove(step, newest_too=True)
        except (UserError, StorageError) as error:
            log(f"warning: step {step} has no name any more, and stays: {error}")

    def _remember(self, step: int, parts: Parts) -> None:
        self._own.add(step)
        self._parts.pop(step, None)
        self._parts[step] = parts
        while len(self._parts) > NUM_REMEMBERED:
            del self._parts[next(iter(self._parts))]


def small_parts(state: dict[str, Any]) -> Parts:
    """Return the small parts of a state, which differ between the names of one step, as JSON."""
    packed_by_key = {key: packed(value) for key, value in state.items() if key not in LARGE}
    return {key: part for key, part in packed_by_key.items() if part is not None}


def packed(value: Any) -> Node:
    """Return a value as JSON with the bytes of its tensors; None if they are many."""
    encoder = Encoder(dtype_of)
    node = encoder.node("", value)
    tensors = encoder.arrays
    if not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        return None
    if sum(each.nbytes for each in tensors.values()) > MAX_PART_BYTES:
        return None
    return json.loads(json.dumps({"tree": node, "tensors": {path: _bytes_of(each) for path, each in tensors.items()}}))


def unpacked(part: Node) -> Any:
    """Return the value that `packed` made JSON of."""

    def tensor(path: str, node: Node) -> torch.Tensor:
        shape, text = part["tensors"][path]
        dtype = getattr(torch, node["tensor"])
        raw = bytearray(base64.b64decode(text))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)

    return decoded("", part["tree"], tensor)


def _bytes_of(tensor: torch.Tensor) -> list[Any]:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [list(tensor.shape), base64.b64encode(raw).decode()]
