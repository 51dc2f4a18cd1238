"""MixtureConfig: `[[data.mixture]]`, what changes in a run's stream from a sample or step on, and its way to segments.

A source is named by its path, as it is written where it joined the stream. Nothing here opens a store.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.errors import UserError, quoted
from threefold.options import Fault, option

if TYPE_CHECKING:
    from datakit.order.mixture import Segment


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """One `[[data.mixture]]`; what it does not name stays as it is."""

    from_sample: int | None = option(None, "the first sample that it is in force for", minimum=1)
    from_step: int | None = option(None, "the same as a step, the first being 1; recorded as a sample", minimum=2)
    weights: dict[str, float] = option(dict, "new weights of sources; 0 reads no more of one", minimum=0)
    add: dict[str, float] = option(dict, "sources that join, each with its weight", above=0)
    remove: tuple[str, ...] = option((), "sources that are read no more; their folders may go")
    skip: tuple[tuple[int, int], ...] = option((), "ranges [first, stop] of samples never to be read", minimum=0)
    mask_documents: str | None = option(None, "file of STORE:K lines, documents whose loss is masked; '' for none")
    seq_length: int | None = option(
        None, "tokens a row from there on; each source is read from its beginning", minimum=1
    )

    @property
    def changes_weights(self) -> bool:
        """Whether it has weights of its own."""
        return bool(self.weights or self.add or self.remove)


@dataclass(frozen=True, slots=True)
class Plan:
    """A stream's sources in the order in which they join, and their weights after `[data]` and each mixture."""

    sources: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]

    @property
    def final(self) -> Mapping[str, float]:
        """The weight of each source at last."""
        return dict(zip(self.sources, self.weights[-1]))

    def first_length(self, number: int, mixture: Sequence[MixtureConfig], seq_length: int) -> int:
        """Return the tokens of the first rows that a source is read in, the stream's first ones if it is not read."""
        lengths = accumulate((later.seq_length for later in mixture), lambda last, new: new or last, initial=seq_length)
        return next((length for length, weights in zip(lengths, self.weights) if weights[number]), seq_length)


def plan(
    stores: Sequence[str], weights: Sequence[float], mixture: Sequence[MixtureConfig], table: str
) -> tuple[Plan, list[Fault]]:
    """Return sources and weights, and the faults between the segments of a table."""
    sources, current = list(stores), list(weights or [1.0] * len(stores))
    lists, faults = [list(current)], []
    steps = [0, 0]  # the last from_sample, and from_step
    for number, later in enumerate(mixture):
        name = f"{table}.mixture[{number}]"

        def fault(key: str, text: str, name: str = name) -> None:
            faults.append(({f"{table}.mixture"}, f"{name}.{key}{text}"))

        if (later.from_sample is None) == (later.from_step is None):
            fault("from_sample", f": {name} needs from_sample or from_step, and one of them alone")
        for kind, (key, start) in enumerate((("from_sample", later.from_sample), ("from_step", later.from_step))):
            if start is not None and start <= steps[kind]:
                fault(key, f" {start} comes after {steps[kind]}: segments are appended, in rising order")
            steps[kind] = max(steps[kind], start or 0)
        for path, weight in later.add.items():
            at = place(sources, path)
            if at is None:
                sources.append(path)
                current.append(weight)
            elif current[at]:
                fault("add", f': {path} is read already; weights = {{ "{path}" = {weight:g} }} changes its weight')
            else:
                current[at] = weight
        for key, path, weight in [
            *(("weights", path, weight) for path, weight in later.weights.items()),
            *(("remove", path, 0.0) for path in later.remove),
        ]:
            at = place(sources, path)
            if at is None:
                way_out = f'add = {{ "{path}" = 1.0 }} lets a new one join'
                fault(key, f": unknown source {path}, known are {', '.join(sources[:8])}; {way_out}")
            elif not is_one(sources, path):
                fault(key, f": {path} is named more than once in {table}.stores; name one of them by a link to it")
            else:
                current[at] = weight
        if not any(current):
            fault("weights", ": the weights of all sources are 0, one must be positive")
        for pair in later.skip:
            if len(pair) != 2 or pair[0] >= pair[1]:
                fault("skip", f": {list(pair)} is not a range [first, stop] of samples")
        lists.append(list(current))
    full = tuple((*known, *[0.0] * (len(sources) - len(known))) for known in lists)
    return Plan(tuple(sources), full), faults


def segments(
    planned: Plan, mixture: Sequence[MixtureConfig], sample_of: Callable[[int], int], table: str
) -> "list[Segment]":
    """Return the segments of a table without faults; `sample_of` returns the first sample of a step."""
    from datakit.order.mixture import Segment

    result = []
    for number, (later, weights) in enumerate(zip(mixture, planned.weights[1:])):
        start = later.from_sample if later.from_step is None else sample_of(later.from_step)
        assert start is not None, "one of both is given"
        masked = read_documents(later.mask_documents, planned.sources, f"{table}.mixture[{number}].mask_documents")
        changed = weights if later.changes_weights else None
        result.append(Segment(start, changed, later.skip, masked, later.from_step, later.seq_length))
    return result


def read_documents(path: str | None, sources: Sequence[str], key: str) -> tuple[tuple[int, int], ...] | None:
    """Return the documents (source, number) that a file lists, a line STORE:K each; UserError that names a bad line.

    `#` begins a comment. No path, "", means no documents, and None that nothing is said of them.
    """
    if not path:
        return None if path is None else ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{key}: cannot read {path}: {error}", hint="lines such as store/web:17, or '' for none"
        ) from None
    documents = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        store, _, document = text.rpartition(":")
        at = place(sources, store)
        if at is None or not document.isdecimal():
            raise UserError(
                f"{path} line {number}: {text} is not a document STORE:K of {', '.join(sources[:8])}",
                hint=f"{sources[0]}:0 is the first document of the first store",
            )
        if not is_one(sources, store):
            raise UserError(
                f"{path} line {number}: {store} is named more than once among the stores",
                hint=f"ln -s {quoted(os.path.abspath(store))} COPY, and name one of them so",
            )
        documents.add((at, int(document)))
    return tuple(sorted(documents))


def is_one(sources: Sequence[str], path: str) -> bool:
    """Return whether a path names one source alone, not copies that are named alike."""
    return sum(os.path.abspath(source) == os.path.abspath(path) for source in sources) == 1


def place(sources: Sequence[str], path: str) -> int | None:
    """Return the number of a source that is named as it was, or by another path to the same folder."""
    if path in sources:
        return sources.index(path)
    absolute = list(map(os.path.abspath, sources))
    return absolute.index(os.path.abspath(path)) if path and os.path.abspath(path) in absolute else None
