"""Make benchmarks/README.md: one table a kit of what holds today, out of the JSON beside each result.

    python -m tools.results_page

A result `benchmarks/KIT/results-DATE.md` has `results-DATE.json` beside it, which benchmarks write with `--record`:
rows of `benchmarks/record.py`. Of rows with one claim the newest holds. A figure is in the page beside it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Row, Values

ROOT = Path(__file__).parents[1]
PAGE = "benchmarks/README.md"
KITS = {"datakit": "datakit", "ckptkit": "ckptkit", "trainer": "trainer", "ops": "fused operations"}
HEAD = """# What holds today

Each row is one claim beside its peer and the raw limit of the same run; ratios within one run are what holds. The date
leads to the result, with the spread and what was missed. This page is made by `python -m tools.results_page` of the
JSON beside each result, which the benchmarks write with `--record FILE`. The ratio is that of the figure to the first
peer, or to the limit where no peer has its unit.
"""
COLUMNS = ("claim", "figure", "peer", "limit", "ratio", "machine", "date", "command")


@dataclass(frozen=True, slots=True)
class Claim:
    """A row that a benchmark wrote, and the page that shows how."""

    row: Row
    result: Path

    @property
    def root(self) -> Path:
        """The tree that has the result."""
        return self.result.parents[2]

    @property
    def script(self) -> Path:
        """The benchmark or the tool that measured it, or the configuration of a run that did."""
        words = self.row.command.split()
        name = next(word for word in words if word.startswith(("benchmarks", "tools.")))
        return self.root / (name if name.endswith((".py", ".toml")) else name.replace(".", "/") + ".py")

    @property
    def line(self) -> str:
        """The row of the table."""
        row, result = self.row, self.result.relative_to(self.root / "benchmarks").as_posix()
        figure, ratio = f"**{with_unit(row.value, row.unit)}**", "" if row.ratio is None else number(row.ratio)
        cells = (
            row.claim,
            figure,
            shown(row.peer),
            shown(row.limit),
            ratio,
            row.machine,
            f"[{row.date}]({result})",
            f"`{row.command}`",
        )
        return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Return a number as pages have it: 335919 as 335,919."""
    return f"{value:,}".removesuffix(".0")


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)}{'' if unit.startswith('%') else ' '}{unit}".strip()


def shown(values: Values) -> str:
    """Return values by name, as in "the copy: 4,123 GB/s" for "the copy [GB/s]"; "none" where there are none."""
    texts = []
    for name, value in values.items():
        what, _, unit = name.removesuffix("]").partition(" [")
        texts.append(f"{what}: {with_unit(value, unit)}")
    return "; ".join(texts) or "none"


def main() -> int:
    (ROOT / PAGE).write_text(page(claims()))
    print(f"wrote {PAGE}")
    return 0


def all_claims(root: Path = ROOT) -> Iterator[Claim]:
    """Yield all claims beside results; ValueError that names a file whose rows have other keys."""
    for path in sorted(root.glob("benchmarks/*/results*.json")):
        for entry in json.loads(path.read_text()):
            try:
                yield Claim(Row(**entry), path.with_suffix(".md"))
            except TypeError as error:
                raise ValueError(f"{path.relative_to(root)}: {error}") from None


def claims(root: Path = ROOT) -> list[Claim]:
    """Return the newest of each claim of a kit."""
    newest: dict[tuple[str, str], Claim] = {}
    for claim in sorted(all_claims(root), key=lambda claim: claim.row.date):
        newest[claim.result.parent.name, claim.row.claim] = claim
    return list(newest.values())


def page(newest: list[Claim]) -> str:
    """Return the Markdown of the page."""
    parts = [HEAD]
    for kit, title in KITS.items():
        lines = [claim.line for claim in newest if claim.result.parent.name == kit]
        table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *lines]
        parts.append("\n".join([f"## {title}", *table, ""]))
    return "\n".join(parts)


def faults(newest: list[Claim]) -> list[str]:
    """Return the claims that their result or their script does not bear out."""
    wrong = []
    for claim in newest:
        row, text = claim.row, claim.result.read_text().replace(",", "")
        if not claim.script.exists():
            wrong.append(f"{row.claim}: there is no {claim.script.relative_to(claim.root)}")
        values = (row.value, *row.peer.values(), *row.limit.values())
        missing = [value for value in values if number(value).replace(",", "") not in text]
        wrong += [f"{row.claim}: {number(value)} is not in {claim.result.name}" for value in missing]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
