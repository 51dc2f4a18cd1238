"""Report: the statistics of stores as one HTML file that needs nothing else, with plots as inline SVG."""

import html
import os
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from datakit.files.durable import replace_durably
from datakit.reports.statistics import Statistics
from threefold.errors import UserError
from threefold.packages import require

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } td:first-child { overflow-wrap: anywhere }
"""


def require_plots() -> None:
    """Raise UserError if plots cannot be drawn here."""
    require("matplotlib", "a report")


def write_report(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Write the report, whole or not at all."""
    require_plots()
    file = Path(path)
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent} for the report", hint=f"mkdir -p {file.parent}")
    replace_durably(file, render_report(statistics).encode())


def render_report(statistics: Statistics) -> str:
    """Return the report's HTML."""
    buckets = [bucket for bucket in statistics.histogram if bucket.num_documents]
    ranges = [_range(bucket.min_length, bucket.max_length) for bucket in statistics.histogram]
    sources = [(source.path or "no source", source.num_documents, source.num_tokens) for source in statistics.sources]
    others = statistics.other_sources
    if others.num_sources:
        sources.append((f"{others.num_sources:,} others", others.num_documents, others.num_tokens))
    title = ", ".join(store.path for store in statistics.stores)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _table(
            ["store", "documents", "tokens"],
            [
                *((store.path, store.num_documents, store.num_tokens) for store in statistics.stores),
                ("all", statistics.num_documents, statistics.num_tokens),
                ("empty documents", statistics.num_empty_documents, 0),
            ],
        ),
        "<h2>Length of documents, in tokens</h2>",
    ]
    if lengths := statistics.lengths:
        names = ("min", "median", "p90", "p99", "max")
        body.append(_table([*names, "mean"], [(*(getattr(lengths, name) for name in names), f"{lengths.mean:,.1f}")]))
        body += [
            _bars("documents by length", ranges, [bucket.num_documents for bucket in statistics.histogram]),
            _bars("tokens by length of their document", ranges, [bucket.num_tokens for bucket in statistics.histogram]),
        ]
    rows = [
        (_range(bucket.min_length, bucket.max_length), bucket.num_documents, bucket.num_tokens) for bucket in buckets
    ]
    body += [
        _table(["length", "documents", "tokens"], rows),
        *_tags(statistics),
        "<h2>Tokens by source file</h2>",
        _bars("tokens", [_short(name) for name, _, _ in sources], [tokens for _, _, tokens in sources], lying=True),
        _table(["source", "documents", "tokens"], sources),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _tags(statistics: Statistics) -> list[str]:
    """Return the part on tags, where there are any."""
    rows = [(tag.name or "no tag", tag.num_documents, tag.num_tokens) for tag in statistics.tags]
    return ["<h2>Tokens by tag</h2>", _table(["tag", "documents", "tokens"], rows)] if rows else []


def _table(names: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    def row(kind: str, cells: Sequence[str | int]) -> str:
        texts = (f"{cell:,}" if isinstance(cell, int) else html.escape(cell) for cell in cells)
        return "<tr>" + "".join(f"<{kind}>{text}</{kind}>" for text in texts) + "</tr>"

    return "<table>" + row("th", names) + "\n".join(row("td", cells) for cells in rows) + "</table>"


def _bars(title: str, names: Sequence[str], values: Sequence[int], *, lying: bool = False) -> str:
    """Return one bar chart as an SVG element, the same bytes for the same values."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(9, 0.8 + 0.28 * len(names) if lying else 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.subplots()
        at = range(len(names))
        if lying:
            axes.barh(at, values, color="#4477aa")
            axes.set_yticks(at, names)
            axes.invert_yaxis()
            axes.xaxis.set_major_formatter(_si)
        else:
            axes.bar(at, values, color="#4477aa")
            axes.set_xticks(at, names, rotation=60, ha="right")
            axes.yaxis.set_major_formatter(_si)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        stream = StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _si(value: float, _: int = 0) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _short(path: str) -> str:
    return path if len(path) <= 40 else f"...{path[-37:]}"
