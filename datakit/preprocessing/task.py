"""Task: what all work items of a preprocessing run have in common, as it travels to the workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from datakit.dedup.item_hashes import ItemHasher
from datakit.format.output import Output
from datakit.preprocessing.item import ItemEncoder
from datakit.preprocessing.recipe import Recipe
from datakit.store.item_records import Progress
from datakit.text.inputs import WorkItem
from datakit.tokenization.encoder import open_encoder
from datakit.tokenization.fast_encoder import NO_TERMS, Terms
from datakit.tokenization.identity import TokenizerIdentity
from threefold.plain import from_plain

HASH = "hash"  # in place of a backend: the documents are only hashed


class Sealer(Protocol):
    """What does a run's work, item by item."""

    def seal(self, item: WorkItem, report: Callable[[Progress], None]) -> None:
        """Do all of an item's work and record it, or leave nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """Where the stores go, how text becomes tokens, whose tokens they are, and the backend with its terms."""

    output: str
    recipe: Recipe
    identity: TokenizerIdentity
    backend: str
    terms: Terms = NO_TERMS

    def sealer(self) -> Sealer:
        """Return what seals the run's items, in the process that calls this."""
        output = Output(self.output)
        if self.backend == HASH:
            return ItemHasher(output, self.recipe.rules)
        encoder = open_encoder(self.recipe.tokenizer, self.backend, self.terms)
        return ItemEncoder(output, self.recipe, encoder, self.identity)

    def to_line(self) -> bytes:
        """Return the task as one line of JSON."""
        return orjson.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Task":
        """Return the task of such a line."""
        task: Task = from_plain(cls, orjson.loads(line))
        return task
