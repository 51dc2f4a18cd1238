"""Tally: what seeds came to, of one small run; those of other ranges are added to it."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ckptkit import git_commit
from threefold.errors import UserError, quoted
from trainer.config import Config, DataConfig
from trainer.verify.seeds import SeedResult, situations


@dataclass(frozen=True, slots=True)
class Tally:
    """Ranges of seeds that ran, those that failed, with why, and how often each rare situation came up."""

    config: str  # digest of the small run
    commit: str
    ranges: tuple[tuple[int, int], ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    situations: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, small: Config) -> "Tally":
        """Return the empty tally of a small run; where its stores are is not part of it."""
        known = asdict(replace(small, data=DataConfig())) | {"packing": small.data.packing}
        digest = blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
        return cls(digest, git_commit() or "", situations=dict.fromkeys(situations(small), 0))

    @classmethod
    def read(cls, path: str, small: Config) -> "Tally":
        """Return what a file has of earlier seeds of the same run, an empty tally if there is none."""
        empty = cls.of(small)
        if not path or path == "-" or not Path(path).is_file():
            return empty
        other = f"{path} is not a report of seeds of this run"
        try:
            known = json.loads(Path(path).read_text(encoding="utf-8"))
            ranges = tuple((int(first), int(last)) for first, last in known["ranges"])
            tally = cls(known["config"], known["commit"], ranges, known["failed"], known["situations"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(other, hint=f"mv {quoted(path)} {quoted(path + '.old')}") from error
        if (tally.config, tally.commit, tally.situations.keys()) != (
            empty.config,
            empty.commit,
            empty.situations.keys(),
        ):
            raise UserError(f"{other}, or of another commit", hint=f"mv {quoted(path)} {quoted(path + '.old')}")
        return tally

    @property
    def num_seeds(self) -> int:
        """Return how many seeds ran."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def never(self) -> list[str]:
        """Return the situations that no seed came to."""
        return [name for name, number in self.situations.items() if not number]

    def refuse_again(self, first: int, last: int) -> None:
        """Raise UserError if some of a range ran already: it would be counted twice."""
        for begin, end in self.ranges:
            if first <= end and begin <= last:
                free = max(stop for _, stop in self.ranges) + 1
                raise UserError(
                    f"seeds {begin}-{end} are counted already", hint=f"--seeds {free}-{free + last - first}"
                )

    def added(self, results: Iterable[SeedResult]) -> "Tally":
        """Return the tally with seeds that follow each other added."""
        results, counts = list(results), Counter(self.situations)
        if not results:
            return self
        for result in results:
            counts.update({name: number for name, number in result.seen.items() if name in counts})
        failed = self.failed | {str(result.seed): result.text for result in results if result.text}
        ranges = tuple(sorted((*self.ranges, (results[0].seed, results[-1].seed))))
        return replace(self, ranges=ranges, failed=failed, situations=dict(counts))

    def to_json(self) -> dict[str, Any]:
        """Return the tally as plain data."""
        return asdict(self) | {"num_seeds": self.num_seeds}


def range_of(text: str) -> tuple[int, int]:
    """Return the first and the last seed of a text such as 1-500; UserError if it is another."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UserError(f"--seeds {text} is not a range such as 1-500", hint="--seeds 1-500")
    return int(first), int(last)
