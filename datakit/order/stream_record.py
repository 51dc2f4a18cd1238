"""Cursor: the complete resume state of a stream, a few hundred bytes that know nothing of ranks or batch sizes.

StreamRecord is what a run records beside it: the stream's sources, their contents and rows, its segments. The cursor's
digest says whether a stream was changed in what is read already; the record says in what. It also keeps what may be
gone or other by then: the rows of a source that is read no more, the sample of a `from_step`.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from datakit.order.arguments import whole_number
from datakit.order.mixture import Segment
from threefold.errors import UserError

CURSOR_VERSION = 1
HINT = 'batch["cursor"] of a DataLoader(dataset, batch_size=None), which does not collate it, or a state_dict()'
VERSION = 1
_MAX_DIFFERENCES = 8


class Stream(Protocol):
    """What a cursor records of a Blend."""

    seed: int
    seq_length: int

    def num_begun(self, num_samples: int) -> int:
        """Return how many changes the first samples depend on."""

    def digest(self, num_changes: int) -> str:
        """Return the digest of what the stream depends on up to the end of the first changes."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How many samples were consumed, of which stream: its seed, row length, and a digest of what these depend on.

    That is `num_segments` changes of the stream, the first weights among them: those that begin later may change still.
    """

    num_samples: int
    seed: int
    seq_length: int
    num_segments: int
    digest: str

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples)

    @classmethod
    def start(cls, blend: Stream, num_samples: int = 0) -> "Cursor":
        """Return the cursor of a blend after its first samples; UserError if that is not a whole number."""
        num_samples = whole_number("num_samples", num_samples)
        num_segments = blend.num_begun(num_samples)
        return cls(num_samples, blend.seed, blend.seq_length, num_segments, blend.digest(num_segments))

    def to_json(self) -> dict[str, int | str]:
        """Return a JSON object of less than 1 KB."""
        return {"version": CURSOR_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> "Cursor":
        """Read what `to_json` returned; UserError if it is something else, say what a DataLoader collated."""
        if not isinstance(value, Mapping):
            raise UserError(f"what is loaded is not a cursor but {reprlib.repr(value)}", hint=HINT)
        version, kinds = value.get("version"), {field.name: field.type for field in fields(cls)}
        if isinstance(version, int) and version != CURSOR_VERSION:
            raise UserError(f"what is loaded is not a cursor of version {CURSOR_VERSION}, but {version}")
        wrong = [name for name in kinds if not isinstance(value.get(name), str if name == "digest" else int)]
        if not isinstance(version, int) or wrong:
            of = f"{wrong[0]} {reprlib.repr(value.get(wrong[0]))}" if wrong else f"keys {reprlib.repr(list(value))}"
            raise UserError(f"what is loaded is not a cursor: it has {of}", hint=HINT)
        try:
            return cls(**{name: value[name] for name in kinds})
        except UserError as error:
            raise UserError(f"what is loaded is not a cursor: {error.message}") from None


@dataclass(frozen=True, slots=True)
class Source:
    """A store of a stream: where it was, the fingerprint of its content, its rows and their tokens, 0 if not known."""

    path: str
    fingerprint: str
    rows: int
    seq_length: int = 0

    def __str__(self) -> str:
        return f"{self.path} ({self.fingerprint[:8]}, {self.rows} rows)"


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A segment as it is recorded: of masked documents the digest alone, "" if it changes none."""

    from_sample: int
    weights: tuple[float, ...] | None
    skip: tuple[tuple[int, int], ...]
    mask_digest: str
    from_step: int | None
    seq_length: int | None = None


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """All sources of a stream, its segments in rising order, and what an order other than its own depends on.

    `orders_copies` says that copies of a store have orders of their own, which in older runs they have not.
    """

    sources: tuple[Source, ...]
    segments: tuple[PlannedSegment, ...]
    order: Mapping[str, Any] = field(default_factory=dict)
    orders_copies: bool = False

    @classmethod
    def of(
        cls,
        sources: Sequence[Source],
        segments: Sequence[Segment],
        masks: Mapping[int, str],
        order: Mapping[str, Any] | None = None,
        *,
        orders_copies: bool,
    ) -> "StreamRecord":
        """Return the record of a stream; `masks` has the digests of masked documents by the sample they begin at."""
        planned = [
            PlannedSegment(
                each.from_sample, each.weights, each.skip, masks.get(each.from_sample, ""), each.from_step,
                each.seq_length,
            )
            for each in segments
        ]  # fmt: skip
        return cls(tuple(sources), tuple(planned), order or {}, orders_copies)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with lists for tuples."""
        found: dict[str, Any] = json.loads(json.dumps({"version": VERSION, **asdict(self)}))
        return {key: part for key, part in found.items() if key not in ("order", "orders_copies") or part}

    @classmethod
    def from_json(cls, value: object) -> "StreamRecord":
        """Read what `to_json` returned; UserError if it is something else."""
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            raise UserError(f"this is not a stream record of version {VERSION}: {str(value)[:100]}")
        try:
            return cls(
                tuple(map(_source, value["sources"])),
                tuple(map(_segment, value["segments"])),
                dict(value.get("order", {})),
                bool(value.get("orders_copies", False)),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise UserError(f"this is not a stream record: {error!r}") from None

    def differences(self, other: "StreamRecord", num_samples: int) -> list[str]:
        """Return how another record differs from this one in what the first samples depend on, a sentence each."""
        pasts = [
            [each for each in record.segments if each.from_sample < num_samples or each is record.segments[0]]
            for record in (self, other)
        ]
        texts = [
            f"{key} of the order was {self.order.get(key, 'none')}, is {other.order.get(key, 'none')}"
            for key in {**self.order, **other.order}
            if self.order.get(key) != other.order.get(key)
        ]
        for number in range(max(map(len, pasts))):
            before, after = [past[number] if number < len(past) else None for past in pasts]
            which = f"segment {number}"
            if before is None or after is None:
                known = before or after
                assert known is not None, "one of both is that long"
                fault = "is missing" if after is None else "is new"
                texts.append(f"{which}, from sample {known.from_sample} on, {fault}")
                continue
            if before.from_sample != after.from_sample:
                texts.append(f"{which} began at sample {before.from_sample}, now it does at {after.from_sample}")
            texts += [f"{which}: {text}" for text in _differences(self._shares(before), other._shares(after))]
            if before.skip != after.skip:
                texts.append(f"{which} skipped {_ranges(before.skip)}, now it does {_ranges(after.skip)}")
            if before.seq_length != after.seq_length:
                lengths = [each.seq_length or "none" for each in (before, after)]
                texts.append(f"{which} had a new seq_length of {lengths[0]}, now it has {lengths[1]}")
            if before.mask_digest != after.mask_digest:
                texts.append(f"{which} masked other documents")
        more = len(texts) - _MAX_DIFFERENCES
        return [*texts[:_MAX_DIFFERENCES], *([f"and {more} differences more"] if more > 0 else [])]

    def _shares(self, segment: PlannedSegment) -> dict[str, tuple[Source, float]]:
        """Return the sources that a segment reads, with their shares of it, by content and number of the copy."""
        weights = segment.weights or ()
        weighted = [(source, weight) for source, weight in zip(self.sources, weights) if weight > 0]
        total = sum(weight for _, weight in weighted)
        seen, found = Counter[str](), {}
        for source, weight in weighted:
            found[f"{source.fingerprint}#{seen[source.fingerprint]}"] = source, weight / total
            seen[source.fingerprint] += 1
        return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run recorded last: its record (None of an old one), and that it had read so many samples at a step.

    `cursor` is that after these, None if it is not known.
    """

    record: StreamRecord | None
    step: int
    num_samples: int
    cursor: Cursor | None = None

    @classmethod
    def read(cls, path: str) -> "Recorded":
        """Read the root.json of a checkpoint of the trainer, or a file of a `state_dict`; UserError otherwise."""
        hint = "--recorded RUN/step-000000100/root.json, of a checkpoint of the run"
        try:
            content = json.loads(Path(path).read_bytes())
            state = content["metadata"]["cursor"] if "metadata" in content else content
            record = content.get("metadata", content)["stream"]
            num_samples, step = int(state["num_samples"]), int(content.get("step", 0))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", hint=hint) from None
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            raise UserError(f"{path} has no stream record of a run", hint=hint) from None
        cursor = Cursor.from_json(state) if "digest" in state else None
        return cls(StreamRecord.from_json(record), step, num_samples, cursor)

    def rows(self, path: str, seq_length: int) -> dict[int, tuple[str, int]]:
        """Return what is known of the rows of a store, by their tokens: fingerprint and number; `seq_length` if not."""
        sources = self.record.sources if self.record else ()
        return {each.seq_length or seq_length: (each.fingerprint, each.rows) for each in sources if each.path == path}

    @property
    def begins_of_steps(self) -> dict[int, int]:
        """The first samples of steps in which segments began, as far as they are recorded."""
        segments = self.record.segments if self.record else ()
        return {each.from_step: each.from_sample for each in segments if each.from_step is not None}


def _source(value: Mapping[str, Any]) -> Source:
    rows, seq_length = int(value["rows"]), int(value.get("seq_length", 0))
    return Source(str(value["path"]), str(value["fingerprint"]), rows, seq_length)


def _segment(value: Mapping[str, Any]) -> PlannedSegment:
    weights, from_step, seq_length = value["weights"], value["from_step"], value.get("seq_length")
    return PlannedSegment(
        int(value["from_sample"]),
        None if weights is None else tuple(map(float, weights)),
        tuple((int(first), int(stop)) for first, stop in value["skip"]),
        str(value["mask_digest"]),
        None if from_step is None else int(from_step),
        None if seq_length is None else int(seq_length),
    )


def _differences(before: Mapping[str, tuple[Source, float]], after: Mapping[str, tuple[Source, float]]) -> list[str]:
    """Return how two lists of shares differ."""
    texts = []
    for key in {**before, **after}:
        if key not in after:
            texts.append(f"{before[key][0]} is missing")
        elif key not in before:
            texts.append(f"{after[key][0]} is new")
        elif abs(before[key][1] - after[key][1]) > 1e-12:
            texts.append(f"the share of {before[key][0].path} was {before[key][1]:.6g}, is {after[key][1]:.6g}")
    if not texts and list(before) != list(after):
        texts.append(f"the order was {', '.join(source.path for source, _ in before.values())}")
    return texts


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"samples {first} to {stop}" for first, stop in ranges) or "none"
