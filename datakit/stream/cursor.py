"""Cursor: the complete resume state of a stream, a few hundred bytes that know nothing of ranks or batch sizes."""

from dataclasses import asdict, dataclass
from typing import Protocol

from datakit.stream.arguments import whole_number
from threefold.errors import UserError

VERSION = 1


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
        except UserError as error:
            raise UserError(f"{value!r} is not a cursor: {error.message}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{value!r} is not a cursor: {error}") from None
