"""Report: the statistics of stores as one HTML file that needs nothing else, with plots as inline SVG.

The page is the template beside this file; only the plots are put in as they are.
"""

import os
from collections.abc import Sequence
from dataclasses import astuple
from io import StringIO
from typing import Any

from datakit.reports.statistics import Statistics
from threefold.packages import require
from threefold.page import render_page, write_page

TEMPLATE = "report.html.j2"


def require_plots() -> None:
    """Raise UserError if a report cannot be made here."""
    for package in ("matplotlib", "jinja2"):
        require(package, "a report")


def write_report(statistics: Statistics, path: str | os.PathLike[str]) -> None:
    """Write the report, whole or not at all."""
    require_plots()
    write_page(render_report(statistics), path)


def render_report(statistics: Statistics) -> str:
    """Return the report's HTML."""
    ranges, sources = [bucket.name for bucket in statistics.histogram], statistics.source_rows
    lengths = statistics.lengths  # min, median, p90, p99, max and mean; None for stores without documents
    charts = [
        _bars("documents by length", ranges, [bucket.num_documents for bucket in statistics.histogram]),
        _bars("tokens by length of their document", ranges, [bucket.num_tokens for bucket in statistics.histogram]),
    ] if statistics.lengths else []  # fmt: skip
    return render_page(
        __package__,
        TEMPLATE,
        title=", ".join(store.path for store in statistics.stores),
        stores=[
            *((store.path, store.num_documents, store.num_tokens) for store in statistics.stores),
            ("all", statistics.num_documents, statistics.num_tokens),
            ("empty documents", statistics.num_empty_documents, 0),
        ],
        lengths=lengths and (*astuple(lengths)[:-1], f"{lengths.mean:,.1f}"),
        length_charts=charts,
        buckets=[
            (bucket.name, bucket.num_documents, bucket.num_tokens)
            for bucket in statistics.histogram
            if bucket.num_documents
        ],
        tags=statistics.tag_rows,
        source_chart=_bars(
            "tokens",
            [name if len(name) <= 40 else f"...{name[-37:]}" for name, _, _ in sources],
            [tokens for _, _, tokens in sources],
            lying=True,
        ),
        sources=sources,
    )


def _bars(title: str, names: Sequence[str], values: Sequence[int], *, lying: bool = False) -> str:
    """Return one bar chart as an SVG element, the same bytes for the same values."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(9, 0.8 + 0.28 * len(names) if lying else 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.subplots()
        if lying:
            axes.barh(range(len(names)), values, color="#4477aa", tick_label=names)
            axes.invert_yaxis()
            axes.xaxis.set_major_formatter(_si)
        else:
            axes.bar(range(len(names)), values, color="#4477aa")
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
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
