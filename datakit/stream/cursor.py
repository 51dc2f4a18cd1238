"""Cursor: the complete resume state of a stream, a few hundred bytes that know nothing of ranks or batch sizes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from threefold.errors import UserError

VERSION = 1


class Stream(Protocol):
    """What a cursor records of a Blend."""

    seed: int
    seq_length: int

    @property
    def segments(self) -> Sequence[object]:
        """The weights and where they begin."""

    def digest(self) -> str:
        """Return the digest of what the stream depends on."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How many samples were consumed, of which stream: its seed, row length, and a digest of its blend segments."""

    num_samples: int
    seed: int
    seq_length: int
    num_segments: int
    digest: str

    @classmethod
    def start(cls, blend: Stream, num_samples: int = 0) -> "Cursor":
        """Return the cursor of a blend after its first samples."""
        return cls(num_samples, blend.seed, blend.seq_length, len(blend.segments), blend.digest())

    def to_json(self) -> dict[str, int | str]:
        """Return a JSON object of less than 1 KB."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> "Cursor":
        """Read what `to_json` gave; UserError if it is something else."""
        if not isinstance(value, dict) or value.get("version") != VERSION:
            raise UserError(f"{value!r} is not a cursor of version {VERSION}")
        try:
            return cls(
                num_samples=int(value["num_samples"]),
                seed=int(value["seed"]),
                seq_length=int(value["seq_length"]),
                num_segments=int(value["num_segments"]),
                digest=str(value["digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{value!r} is not a cursor: {error}") from None
