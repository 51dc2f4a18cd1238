"""Sink: what takes the lines of a run, and how a line becomes numbers and texts under flat names."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TEXT_ONLY = ("event", "step")  # of a line: what the others are said of


class Sink(Protocol):
    """Takes lines in their order. Whoever wants the values of a line has them as the metrics file has."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line."""

    def flush(self) -> None:
        """Bring what was taken to where it can be read."""

    def close(self) -> None:
        """Flush, and end."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a sink is opened with: the run, the step after which its lines begin, and the settings by dotted name.

    `run` is the same for all starts of a run. Lines of steps after `step` that are there already are replaced.
    `sinks` had the lines up to that step.
    """

    run: str
    step: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sinks: Sequence[str] = ()

    @property
    def is_resumed(self) -> bool:
        """Return whether the run goes on from a step."""
        return self.step > 0

    @property
    def texts(self) -> dict[str, str]:
        """Return the settings as texts."""
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.settings.items()}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables and lists by name: {"a": {"b": [7]}} makes a/b/0 of 7. None is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from flat(dict(zip(map(str, range(len(value))), value)), f"{prefix}{name}/")
        elif value is not None:
            yield prefix + name, value


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by name, those of an event under its kind, as eval/loss."""
    prefix = f"{line['event']}/" if "event" in line else ""
    return {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else float(value)
        for name, value in flat({name: line[name] for name in line if name not in TEXT_ONLY}, prefix)
        if isinstance(value, int | float)
    }


def text_of(line: Mapping[str, Any]) -> str:
    """Return an event as JSON; nothing of a step's line."""
    return json.dumps(line) if "event" in line else ""


def dotted(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name; a list is one value."""
    names: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            names |= {f"{name}.{inner}": deep for inner, deep in dotted(value).items()}
        else:
            names[name] = value
    return names


def step_of(line: Mapping[str, Any]) -> int:
    """Return the step of a line."""
    return int(line["step"])
