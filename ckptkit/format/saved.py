"""Saved: what the saver itself knows of a save (when, where, by which code, how long), recorded in the root."""

import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import threefold

MAX_TEXT_BYTES, MAX_SECONDS = 255, 1e12


@dataclass(frozen=True, slots=True)
class Saved:
    """When writer 0 put the root (seconds since the epoch), on which host, by which code, and how long it took.

    write_s is what writer 0 took for its own files, commit_s what passed from then on until the root was put: the wait
    for all other writers and the reading of their indexes.
    """

    saved_at: float
    host: str
    version: str
    code: str
    write_s: float
    commit_s: float

    @classmethod
    def now(cls, *, code: str, write_s: float, commit_s: float) -> "Saved":
        """Return a save that this process commits now."""
        return cls(time.time(), socket.gethostname(), f"threefold {threefold.__version__}", code, write_s, commit_s)

    def to_json(self) -> dict[str, object]:
        """Return the fields of the root's `saved`: the time as ISO 8601 in UTC, texts cut to their cap."""
        texts = {name: _cut(getattr(self, name)) for name in ("host", "version", "code")}
        seconds = {name: round(getattr(self, name), 6) for name in ("write_s", "commit_s")}
        return {"saved_at": utc_text(self.saved_at), **texts, **seconds}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Saved":
        """Read what `to_json` gave; KeyError, TypeError or ValueError where it is something else."""
        at = datetime.fromisoformat(_text(fields["saved_at"]))
        if at.tzinfo is None:
            raise ValueError(f"{fields['saved_at']!r} has no time zone")
        try:
            at = at.astimezone(UTC)  # so that it can be written again
        except OverflowError:
            raise ValueError(f"{fields['saved_at']!r} is in no year of UTC") from None
        return cls(
            saved_at=at.timestamp(),
            host=_text(fields["host"]),
            version=_text(fields["version"]),
            code=_text(fields["code"]),
            write_s=_seconds(fields["write_s"]),
            commit_s=_seconds(fields["commit_s"]),
        )


def utc_text(time_s: float) -> str:
    """Return a time in seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"{value!r} is not a text of at most {MAX_TEXT_BYTES} bytes")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)
