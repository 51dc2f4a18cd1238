"""What a benchmark measured, as rows of the JSON beside its result: the page of what holds today is made of these.

    python benchmarks/datakit/packing.py --record benchmarks/datakit/results-2031-01-02.json

A row is a claim with a value and its unit, what peers and the raw limit had in the same run, and the ratio to the first
of them. The machine, the date and the command are those of the run. A row of the same claim in the file is replaced.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from math import floor, log10
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
Values = Mapping[str, float]  # by name; "fetches [MB/s]" has a unit of its own, others that of the claim
NONE: Values = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """One claim that was measured."""

    claim: str
    value: float
    unit: str
    peer: Values
    limit: Values
    ratio: float | None  # of the value to the first peer of its unit, else to the first limit of it
    machine: str
    date: str
    command: str


class Record:
    """The rows of one run, which go into a file; without a file they go nowhere."""

    def __init__(self, path: str = "") -> None:
        self._path = Path(path).absolute() if path else None
        if self._path is not None:  # before anything is measured
            if not self._path.parent.is_dir():
                raise argparse.ArgumentTypeError(f"{self._path.parent} is not a folder")
            self._others()

    def add(self, claim: str, value: float, unit: str, *, peer: Values = NONE, limit: Values = NONE) -> None:
        """Write a claim into the file; one of the same words is replaced."""
        if self._path is None:
            return
        row = Row(
            claim,
            rounded(value),
            unit,
            rounded_values(peer),
            rounded_values(limit),
            ratio(value, {**peer, **limit}),
            machine(),
            date.today().isoformat(),
            command(),
        )
        rows = [*(row for row in self._others() if row["claim"] != claim), asdict(row)]
        self._path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")

    def _others(self) -> list[dict[str, Any]]:
        """Return the rows that the file has; ArgumentTypeError if it is a file of something else."""
        if self._path is None or not self._path.exists():
            return []
        try:
            return [asdict(Row(**row)) for row in json.loads(self._path.read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"{self._path} has no rows of claims: {error}") from None


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option --record; the parsed arguments have a Record of that name."""
    parser.add_argument(
        "--record", type=Record, default="", metavar="FILE", help="write the claims there, as JSON beside a result"
    )


def rounded(value: float) -> float:
    """Return a value with the digits that a page shows: 335918.7 as 335919, 32.51 as 32.5, 1.7234 as 1.72, 0.0046."""
    size = floor(log10(abs(value))) if value else 0
    return round(value) if size >= 2 else round(value, 1 if size == 1 else max(2, 1 - size))


def rounded_values(values: Values) -> dict[str, float]:
    return {name: rounded(value) for name, value in values.items()}


def ratio(value: float, others: Values) -> float | None:
    """Return the value over the first other that is not zero and has no unit of its own."""
    comparable = (other for name, other in others.items() if other and not name.endswith("]"))
    first = next(comparable, None)
    return None if first is None else rounded(value / first)


def machine() -> str:
    """Return the GPUs where torch sees some, and the cores of this process."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return cores
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {cores}"


def command() -> str:
    """Return the command as it was typed, without --record."""
    words, spec = list(sys.argv[1:]), sys.modules["__main__"].__spec__
    if "--record" in words:
        at = words.index("--record")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--record=")]
    script = Path(sys.argv[0]).absolute()
    own = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", *(["-m", spec.name] if spec else [own]), *words])
