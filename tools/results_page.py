"""Make benchmarks/README.md: one table a kit of what holds today, out of the JSON beside each result.

    python -m tools.results_page

A result `benchmarks/KIT/results-DATE.md` has `results-DATE.json` beside it: rows of claim, figure, peer, limit, card,
date and command. Of rows with one claim the newest holds. A figure is in the page beside it.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "benchmarks/README.md"
KITS = {"datakit": "datakit", "ckptkit": "ckptkit", "trainer": "trainer", "ops": "fused operations"}
HEAD = """# What holds today

Each row is one claim beside its peer and the raw limit of the same run; ratios within one run are what holds. The date
leads to the result, with the spread and what was missed. This page is made by `python -m tools.results_page` of the
JSON beside each result.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One claim that was measured, and the page that shows how."""

    claim: str
    figure: str
    peer: str
    limit: str
    card: str
    date: str
    command: str
    result: Path

    @property
    def script(self) -> Path:
        """The benchmark that measured it."""
        words = self.command.split()
        name = next(word for word in words if word.startswith("benchmarks"))
        return ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")

    @property
    def line(self) -> str:
        """The row of the table."""
        link = f"[{self.date}]({self.result.relative_to(ROOT / 'benchmarks').as_posix()})"
        cells = (self.claim, f"**{self.figure}**", self.peer, self.limit, self.card, link, f"`{self.command}`")
        return f"| {' | '.join(cells)} |"


def main() -> int:
    (ROOT / PAGE).write_text(page(rows()))
    print(f"wrote {PAGE}")
    return 0


def all_rows() -> Iterator[Row]:
    """Yield all rows beside results; ValueError that names a file whose rows have other keys."""
    for path in sorted(ROOT.glob("benchmarks/*/results*.json")):
        for entry in json.loads(path.read_text()):
            try:
                yield Row(**entry, result=path.with_suffix(".md"))
            except TypeError as error:
                raise ValueError(f"{path.relative_to(ROOT)}: {error}") from None


def rows() -> list[Row]:
    """Return the newest row of each claim of a kit."""
    newest: dict[tuple[str, str], Row] = {}
    for row in sorted(all_rows(), key=lambda row: row.date):
        newest[row.result.parent.name, row.claim] = row
    return list(newest.values())


def page(newest: list[Row]) -> str:
    """Return the Markdown of the page."""
    parts = [HEAD]
    for kit, title in KITS.items():
        lines = [row.line for row in newest if row.result.parent.name == kit]
        table = ["| claim | figure | peer | limit | card | date | command |", "|---|---|---|---|---|---|---|", *lines]
        parts.append("\n".join([f"## {title}", *table, ""]))
    return "\n".join(parts)


def faults(newest: list[Row]) -> list[str]:
    """Return the rows that their result or their script does not bear out."""
    wrong = [f"{row.claim}: there is no {row.script.relative_to(ROOT)}" for row in newest if not row.script.exists()]
    for row in newest:
        numbers = re.findall(r"\d+(?:[.,]\d+)*", f"{row.figure} {row.peer} {row.limit}")
        text = row.result.read_text()
        wrong += [f"{row.claim}: {number} is not in {row.result.name}" for number in numbers if number not in text]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
