"""`datakit stats`: count documents, lengths and sources."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from datakit.commands.shared import Reporting
from threefold.cli import print_json
from threefold.console import print_table
from threefold.options import argument, option

if TYPE_CHECKING:
    from datakit.reports.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `datakit stats`."""

    stores: tuple[str, ...] = argument("STORE", "stores, counted together")
    report: str | None = option(None, "write a page with plots too; needs threefold[plot]", metavar="FILE.html")


def run(options: Options) -> None:
    """Count documents and tokens by length, by tag and by source file, exactly, from the indices alone."""
    from datakit.reports.html import require_plots, write_report
    from datakit.reports.statistics import statistics

    if options.report:
        require_plots()
    counted = statistics(options.stores)
    if options.report:
        write_report(counted, options.report)
        print(f"wrote {options.report}", file=sys.stderr)
    if options.json:
        print_json(asdict(counted))
    else:
        _print_statistics(counted)


def _print_statistics(counted: "Statistics") -> None:
    for store in counted.stores:
        print(f"{store.path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens")
    if len(counted.stores) > 1:
        print(f"together: {counted.num_documents:,} documents, {counted.num_tokens:,} tokens")
    print(f"empty documents  {counted.num_empty_documents:,}")
    if lengths := counted.lengths:
        print(
            f"tokens a document  min {lengths.min:,}  median {lengths.median:,}  p90 {lengths.p90:,}  "
            f"p99 {lengths.p99:,}  max {lengths.max:,}  mean {lengths.mean:,.1f}"
        )
    rows = [(bucket.name, f"{bucket.num_documents:,}", f"{bucket.num_tokens:,}") for bucket in counted.histogram]
    print()
    print_table(("length", "documents", "tokens"), rows)
    if counted.tags:
        _print_shares("tag", counted.tag_rows)
    _print_shares("source", counted.source_rows)


def _print_shares(what: str, rows: Sequence[tuple[str, int, int]]) -> None:
    """Print names with their numbers of documents and tokens, the names last: they may be long."""
    print()
    cells = [(f"{num_tokens:,}", f"{num_documents:,}", name) for name, num_documents, num_tokens in rows]
    print_table(("tokens", "documents", what), cells, left={what})
