"""A calibration: how long the parts of a step took on one card, which `trainer bench gpu` measured and plans read.

Each figure is one pass of one part at a place: a product by tokens, rows and columns, attention by the length of a row,
the size of a head and query heads a key head, other kernels by bytes. A part at another place has the rate of those
around it: the mean of their logs, by the inverse fourth power of the distance in logs. At a measured place it is that.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from threefold.errors import UserError

FORMAT = 1
UNITS = {"product": "operations", "attention": "operations", "beside": "seconds"}  # of work; of all others bytes
MAKE = "trainer bench gpu --output calibration.json"


@dataclass(frozen=True, slots=True)
class PartRate:
    """One pass of a part: where it was measured, its work in operations or bytes, and its median seconds.

    Operations of attention are those that a causal mask leaves, bytes of collectives those of the bus. Of a collective
    beside a product the work is what that hides, of the seconds that the shorter of the two takes.
    """

    part: str
    way: str
    dtype: str
    place: tuple[float, ...]
    work: float
    seconds: float

    @property
    def rate(self) -> float:
        """Return the work a second."""
        return self.work / self.seconds


@dataclass(frozen=True)
class Calibration:
    """The figures of one card; `launch_s` is what the host takes to start a kernel, `host_s` each pass of a layer, to
    make norms again, and for a call of a group if there were several ranks."""

    card: str
    versions: dict[str, str]
    capacity: float
    launch_s: float
    host_s: dict[str, float]
    figures: tuple[PartRate, ...]
    _known: dict[tuple[Any, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def _rates(self) -> "dict[tuple[str, str, str], tuple[Any, Any]]":
        """Return the logs of places and of rates by part, pass and dtype."""
        grouped: dict[tuple[str, str, str], list[PartRate]] = defaultdict(list)
        for figure in self.figures:
            grouped[figure.part, figure.way, figure.dtype].append(figure)
        return {
            key: (np.log([each.place for each in some]), np.log([each.rate for each in some]))
            for key, some in grouped.items()
        }

    @cached_property
    def fastest(self) -> float:
        """Return the most operations a second of any product or attention."""
        return max(figure.rate for figure in self.figures if figure.part in ("product", "attention"))

    def has(self, part: str, way: str, dtype: str) -> bool:
        """Return whether a part was measured."""
        return (part, way, dtype) in self._rates

    def seconds(self, part: str, way: str, dtype: str, place: Sequence[float], work: float) -> float:
        """Return how long so much work takes; UserError if the part was not measured in the dtype."""
        return work / self.rate(part, way, dtype, tuple(place))

    def rate(self, part: str, way: str, dtype: str, place: tuple[float, ...]) -> float:
        """Return the work a second of a part at a place.

        Of two figures, 100 a second at 1 and 400 at 16, a place of 4 has 200.
        """
        key = part, way, dtype, place
        if key not in self._known:
            if not self.has(part, way, dtype):
                name = f"{part} {way}".strip()
                raise UserError(f"the calibration of {self.card} has no figures of {name} in {dtype}", hint=MAKE)
            places, rates = self._rates[part, way, dtype]
            distances = np.square(places - np.log(place)).sum(1)
            nearest = int(distances.argmin())
            weights = 1 / np.maximum(distances, 1e-9) ** 2
            mean = rates[nearest] if distances[nearest] < 1e-9 else (weights * rates).sum() / weights.sum()
            self._known[key] = math.exp(mean)
        return self._known[key]

    def known(self) -> dict[str, Any]:
        """Return it as plain data, with the rates and their units."""
        plain = {name.name: getattr(self, name.name) for name in fields(self) if not name.name.startswith("_")}
        rows = [
            {**asdict(figure), "unit": UNITS.get(figure.part, "bytes"), "rate": figure.rate} for figure in self.figures
        ]
        return {"format": FORMAT, **plain, "figures": rows}


def read_calibration(path: str) -> Calibration:
    """Return a calibration from its file; UserError if there is none, or it is of another kind."""
    try:
        known = json.loads(Path(path).read_text())
        if known["format"] != FORMAT:
            raise ValueError(f"of format {known['format']}, not {FORMAT}")
        names = [name.name for name in fields(PartRate)]
        rows = [{name: row[name] for name in names} for row in known["figures"]]
        figures = tuple(PartRate(**{**row, "place": tuple(map(float, row["place"]))}) for row in rows)
        if not figures or min(min(each.work, each.seconds, *each.place) for each in figures) <= 0:
            raise ValueError("a figure is not above 0")
        texts = str(known["card"]), {str(name): str(text) for name, text in known["versions"].items()}
        numbers = float(known["capacity"]), float(known["launch_s"])
        host = {name: float(known["host_s"][name]) for name in {*"FB", *known["host_s"]}}
        return Calibration(*texts, *numbers, host, figures)
    except OSError as error:
        raise UserError(f"no calibration can be read at {path}: {error.strerror}", hint=MAKE) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a calibration of this version: {error!r}", hint=MAKE) from None
