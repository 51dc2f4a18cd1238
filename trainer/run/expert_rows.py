"""How many rows of experts a device has memory for, by a run's plan; layers whose rows are more are made again."""

import math
from bisect import bisect_right

from trainer.config import Config
from trainer.job.ranks import Ranks
from trainer.parallel.rows import RowLimit
from trainer.run.memory import size_text
from trainer.run.memory_check import Plan, device_memory, with_values


def rows_that_fit(config: Config, device_bytes: int) -> float:
    """Return the most rows of a rank, over their mean, with which a run fits; infinite if all there can be do.

    They are eighths, as the bound is raised, and not fewer than what the run begins with. Nothing is known of a device
    with 0 bytes.
    """
    parallel = config.parallel
    if parallel.ep == 1 or parallel.moe_dispatch == "alltoall" or not device_bytes:
        return math.inf
    eighths = range(math.ceil(8 * parallel.moe_rows), 8 * parallel.ep + 1)
    count = bisect_right(eighths, device_bytes, key=lambda number: planned(config, number / 8))
    if count == len(eighths):
        return math.inf
    return eighths[count - 1] / 8 if count else parallel.moe_rows


def planned(config: Config, rows: float) -> int:
    """Return the bytes that a rank takes, with memory for so many times the mean rows."""
    return Plan(with_values(config, {"parallel.moe_rows": rows})).total


def limit_rows(limit: RowLimit, config: Config, ranks: Ranks) -> None:
    """Set how many rows fit, the same on all ranks, whose devices may differ; say it if not all do."""
    [most] = ranks.maximum([-rows_that_fit(config, device_memory(ranks.device))])
    limit.fits = -most
    if text := crowded_text(limit.fits):
        ranks.say(text)


def rows_text(config: Config, device_bytes: int) -> str:
    """Return what a rank takes with memory for the rows that are planned, and for all that there can be."""
    parallel, most = config.parallel, rows_that_fit(config, device_bytes)
    sizes = [size_text(planned(config, rows)) for rows in (parallel.moe_rows, float(parallel.ep))]
    text = f"{sizes[0]} a rank for {parallel.moe_rows:g} times the mean rows of its experts, {sizes[1]} if all rows go "
    return "; ".join([f"{text}to one rank's", *filter(None, [crowded_text(most)])])


def crowded_text(most: float) -> str:
    """Return what becomes of more rows than fit; nothing if all do."""
    return "" if most == math.inf else f"layers of experts with more than {most:g} times the mean rows are made again"
