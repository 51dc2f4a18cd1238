"""Note: what an unfinished output is made of, and which run noted it; a small JSON file below `.work`, put once."""

import os
import socket
from typing import Any, NamedTuple

import orjson

from threefold.errors import CheckFailed


class Note(NamedTuple):
    """What an unfinished output is made of, and the name of the `run` that noted it, "" in notes of older programs."""

    made_of: dict[str, Any]
    run: str

    @classmethod
    def parse(cls, place: str, content: bytes) -> "Note":
        """Read the note at `place`; CheckFailed if it is damaged."""
        try:
            made_of = dict(orjson.loads(content))
            return cls(made_of, str(made_of.pop("run", "")))
        except (TypeError, ValueError) as error:
            raise CheckFailed(f"{place} is damaged: {error!r}", hint="choose another --output") from None

    @property
    def by(self) -> str:
        """The run for a message, "" if it is not known."""
        return f" by run {self.run}" if self.run else ""

    @classmethod
    def of_this_run(cls, made_of: dict[str, Any]) -> "Note":
        """Return the note of a run of this process."""
        return cls(made_of, f"{socket.gethostname()}:{os.getpid()}")

    def encode(self) -> bytes:
        """Return the content of its file."""
        return orjson.dumps(self.made_of | {"run": self.run})
