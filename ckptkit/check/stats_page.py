"""Stats page: the statistics of a checkpoint's tensors as one HTML file, with a histogram of magnitudes a tensor.

Histograms share one axis, a bar for each power of two; heights grow with the logarithm of counts.
"""

import math
from collections.abc import Mapping
from typing import Any

from ckptkit.check.stats import TensorStatistics
from threefold.page import render_page

TEMPLATE = "stats.html.j2"
BAR_WIDTH, HEIGHT = 4, 28


def render_statistics(about: Mapping[str, Any], statistics: Mapping[str, TensorStatistics]) -> str:
    """Return the HTML of what `describe` returned and the statistics of tensors, in the order of the tensor table."""
    exponents = [exponent for stats in statistics.values() for exponent in stats.magnitudes]
    first, last = min(exponents, default=0), max(exponents, default=0)
    most = max((count for stats in statistics.values() for count in stats.magnitudes.values()), default=1)
    return render_page(
        __package__,
        TEMPLATE,
        title=about["url"],
        facts=[(name, about[name]) for name in ("step", "layout", "num_tensors", "num_elements", "tensor_bytes")],
        num_nan=sum(stats.num_nan for stats in statistics.values()),
        num_inf=sum(stats.num_inf for stats in statistics.values()),
        bounds=(first, last + 1),
        width=(last - first + 1) * BAR_WIDTH,
        height=HEIGHT,
        rows=[
            ((row["name"], row["dtype"], str(row["shape"]), *cells(stats)), bars(stats.magnitudes, first, most))
            for row in about["tensors"]
            if (stats := statistics.get(row["name"])) is not None
        ],
    )


def cells(stats: TensorStatistics) -> tuple[str, ...]:
    """Return the statistics of a tensor as texts: counts, then range, mean, deviation and norm."""
    counts = (stats.num_elements, stats.num_nan, stats.num_inf, stats.num_zero)
    values = (stats.min, stats.max, stats.mean if stats.num_finite else None, stats.std, stats.norm)
    return (*(f"{count:,}" for count in counts), *("-" if value is None else f"{value:.6g}" for value in values))


def bars(magnitudes: Mapping[int, int], first: int, most: int) -> str:
    """Return the SVG path of a histogram whose axis begins at an exponent and whose highest bar has `most` elements."""
    path = []
    for exponent in sorted(magnitudes):
        height = 1 + round((HEIGHT - 1) * math.log1p(magnitudes[exponent]) / math.log1p(most))
        path.append(f"M{(exponent - first) * BAR_WIDTH},{HEIGHT}v{-height}h{BAR_WIDTH - 1}v{height}z")
    return "".join(path)
