"""Cursor: the complete resume state of a stream, a few hundred bytes that know nothing of ranks or batch sizes."""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from datakit.order.arguments import whole_number
from threefold.errors import UserError

VERSION = 1
HINT = 'batch["cursor"] of a DataLoader(dataset, batch_size=None), which does not collate it, or a state_dict()'


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
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> "Cursor":
        """Read what `to_json` returned; UserError if it is something else, say what a DataLoader collated."""
        if not isinstance(value, Mapping):
            raise UserError(f"what is loaded is not a cursor but {reprlib.repr(value)}", hint=HINT)
        version, kinds = value.get("version"), {field.name: field.type for field in fields(cls)}
        if isinstance(version, int) and version != VERSION:
            raise UserError(f"what is loaded is not a cursor of version {VERSION}, but {version}")
        wrong = [name for name in kinds if not isinstance(value.get(name), str if name == "digest" else int)]
        if not isinstance(version, int) or wrong:
            of = f"{wrong[0]} {reprlib.repr(value.get(wrong[0]))}" if wrong else f"keys {reprlib.repr(list(value))}"
            raise UserError(f"what is loaded is not a cursor: it has {of}", hint=HINT)
        try:
            return cls(**{name: value[name] for name in kinds})
        except UserError as error:
            raise UserError(f"what is loaded is not a cursor: {error.message}") from None
