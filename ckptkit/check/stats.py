"""Stats: what the values of each tensor are like, in one streaming pass: NaN, Inf, zeros, range, moments, magnitudes.

Min, max, mean, standard deviation, L2 norm and magnitudes are those of the finite elements. Mean and deviation are
joined block by block (Chan, Golub and LeVeque 1979), so that nothing cancels. Memory: two slabs of 32 MiB, some MiB a
thread, one granule of each open file, and what the reader holds of all part indexes.

As a page they are one HTML file, with a histogram of magnitudes a tensor. Histograms share one axis, a bar for each
power of two; heights grow with the logarithm of counts.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
from typing import Any

import numpy as np

from ckptkit.check.elements import BLOCK_ELEMENTS, json_number, l2_norm, widened
from ckptkit.check.slabs import AHEAD_SLAB_BYTES, Source, chosen, read_ahead
from ckptkit.io.blocks import Bytes
from ckptkit.loading.chunk_source import ChunkSource, reading_threads, usual_threads
from ckptkit.model.tensor import ITEMSIZE
from threefold.page import render_page

TEMPLATE = "stats.html.j2"
BAR_WIDTH, HEIGHT = 4, 28
_LARGE = 1e300  # values of which some thousands may sum to more than a float holds


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Counts of a tensor's elements, and the range, mean, spread and L2 norm of those that are finite.

    `spread` is the square root of the sum of squared deviations from the mean. `magnitudes` has the number of elements
    x with 2**e <= |x| < 2**(e+1) by e; what is smaller than all normal float64 counts as e = -1023.
    """

    num_elements: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0
    min: float | None = None
    max: float | None = None
    mean: float = 0.0
    spread: float = 0.0
    norm: float = 0.0
    magnitudes: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_finite(self) -> int:
        return self.num_elements - self.num_nan - self.num_inf

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite elements, None without one."""
        return self.spread / math.sqrt(self.num_finite) if self.num_finite else None

    def __add__(self, other: "TensorStatistics") -> "TensorStatistics":
        """Return the statistics of these elements and those of `other` together."""
        count = self.num_finite + other.num_finite
        share, apart = other.num_finite / max(count, 1), other.mean - self.mean
        between = abs(apart) * math.sqrt(self.num_finite * share)
        return TensorStatistics(
            self.num_elements + other.num_elements,
            self.num_nan + other.num_nan,
            self.num_inf + other.num_inf,
            self.num_zero + other.num_zero,
            min((each for each in (self.min, other.min) if each is not None), default=None),
            max((each for each in (self.max, other.max) if each is not None), default=None),
            self.mean + apart * share,
            math.hypot(self.spread, other.spread, between),
            math.hypot(self.norm, other.norm),
            Counter(self.magnitudes) + Counter(other.magnitudes),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON holds them, without a mean where no element is finite."""
        return {
            "elements": self.num_elements, "nan": self.num_nan, "inf": self.num_inf, "zeros": self.num_zero,
            "min": self.min, "max": self.max, "mean": json_number(self.mean if self.num_finite else None),
            "std": json_number(self.std), "norm": json_number(self.norm),
            "magnitudes": {str(exponent): self.magnitudes[exponent] for exponent in sorted(self.magnitudes)},
        }  # fmt: skip


def tensor_statistics(
    source: ChunkSource,
    *,
    only: Sequence[str] = (),
    slab_bytes: int = AHEAD_SLAB_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, TensorStatistics]:
    """Return the statistics of the tensors that hold data, of those that fit a pattern of `only` where there is one.

    UserError where the checkpoint is one node's part of a step. `progress` is called with the bytes done and the total.
    """
    source.root.check_whole(source.url)
    [table] = chosen([source.root], only)
    infos = [info for info in table.values() if info.placement.tied_to is None]
    statistics = {info.name: TensorStatistics() for info in infos}
    read = Source(source, {info.name: info for info in infos})
    total, done = sum(info.size_bytes for info in infos), 0
    with reading_threads(usual_threads() + 1, source) as pool:
        for slab, (data,) in read_ahead(pool, [read], infos, slab_bytes):
            name, dtype = slab.info.name, slab.info.dtype
            size = BLOCK_ELEMENTS * ITEMSIZE[dtype]
            blocks = [data[start : start + size] for start in range(0, len(data), size)]
            described = pool.map(statistics_of, blocks, repeat(dtype))
            statistics[name] = reduce(TensorStatistics.__add__, described, statistics[name])
            done += slab.size_bytes
            progress(done, total)
    return statistics


def statistics_of(data: Bytes, dtype: str) -> TensorStatistics:
    """Return the statistics of elements, which are one block."""
    with np.errstate(all="ignore"):
        numbers = widened(data, dtype)
        values = numbers.astype(np.float64, copy=False)
        counts = np.bincount(values.view(np.int64) >> 52 & 2047, minlength=2048)  # by the bits of the exponent
        num_elements, num_nan, num_beyond = len(values), 0, int(counts[2047])
        if num_beyond:
            num_nan = int(np.isnan(values).sum())
            values = numbers = values[np.isfinite(values)]
        num_zero = len(values) - int(np.count_nonzero(values))
        counts[0] -= num_zero
        magnitudes = {exponent - 1023: int(counts[exponent]) for exponent in np.flatnonzero(counts[:2047]).tolist()}
        if not len(values):
            return TensorStatistics(num_elements, num_nan, num_beyond - num_nan)
        least, most = numbers.min().item(), numbers.max().item()
        scale = max(abs(least), abs(most)) if max(abs(least), abs(most)) > _LARGE else 1.0
        mean = float(np.mean(values / scale)) * scale if scale != 1 else float(np.mean(values))
        return TensorStatistics(
            num_elements, num_nan, num_beyond - num_nan, num_zero, least, most, mean, l2_norm(values - mean),
            l2_norm(values), magnitudes,
        )  # fmt: skip


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
