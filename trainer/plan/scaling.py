"""The scaling curve of a run: its best plan on more and more GPUs, and which share of them the first ones' rate is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise, takewhile
from typing import Any, Literal

from threefold.errors import UserError
from trainer.config import Config
from trainer.plan.rates import Rates
from trainer.plan.search import Planned, best_plans
from trainer.plan.volumes import VolumeTable

Batch = Literal["fixed", "grown"]


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on so many GPUs with its batch, or why there is none."""

    num_gpus: int
    batch: int
    plan: Planned | None
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of all GPUs, 0 without a plan that fits."""
        if self.plan is None:
            return 0.0
        return self.batch * self.plan.config.train.seq_length / self.plan.time.total


def scaling(config: Config, num_gpus: int, most: int, rates: Rates, batch: Batch) -> Iterator[Point]:
    """Yield points of `num_gpus`, of twice as many and so on, and of `most`; a batch that is grown grows as they do."""
    volumes, first = VolumeTable(), config.train.global_batch_size
    for number in [*takewhile(lambda number: number < most, (num_gpus << place for place in count())), most]:
        size, ramp = first, config.train.rampup_batch_size
        if batch == "grown":
            size, *grown = (samples * number // num_gpus for samples in (first, *ramp))
            ramp = tuple(grown)
        run = replace(config, train=replace(config.train, global_batch_size=size, rampup_batch_size=ramp))
        try:
            best = best_plans(run, number, rates, "time", volumes)[0]
            reason = "" if best.fits else f"does not fit into {rates.capacity / 1e9:g} GB"
            yield Point(number, size, best if best.fits else None, reason)
        except UserError as error:
            yield Point(number, size, None, error.message)


def efficiency(points: list[Point]) -> list[float]:
    """Return the tokens a second of a GPU over those of the first point that has a plan, 0 without one."""
    each = [point.tokens_per_s / point.num_gpus for point in points]
    first = next((rate for rate in each if rate), 1.0)
    return [rate / first for rate in each]


def curve(points: list[Point], title: str) -> Any:
    """Return a matplotlib figure of tokens a second by GPUs, and the share of the first point's rate a GPU."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    planned = [(point, share) for point, share in zip(points, efficiency(points), strict=True) if point.plan]
    gpus, rates = [point.num_gpus for point, _ in planned], [point.tokens_per_s for point, _ in planned]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(gpus, [rates[0] / gpus[0] * number for number in gpus], "--", color="0.6", label="as the first ones")
    above.plot(gpus, rates, "o-", color="C0", label="planned")
    above.set(title=title, xscale="log", yscale="log", ylabel="tokens a second")
    above.legend()
    below.plot(gpus, [100 * share for _, share in planned], "o-", color="C0")
    below.set(xscale="log", xlabel="GPUs", ylabel="% a GPU of the first", ylim=(0, 105))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    below.set_xticks([gpus[-1], *(number for number, after in pairwise(gpus) if after > 1.5 * number)])
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))
    return figure
