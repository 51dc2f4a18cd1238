"""Metrics: the numbers of a program that a save records in its root."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from ckptkit.format.state_tree import METADATA
from threefold.errors import UserError


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers; UserError for what is not a number."""
    found: dict[str, Any] = {}
    if not isinstance(metrics, Mapping):
        raise UserError(f"metrics are a dict of numbers, not {metrics!r}", hint='metrics={"val_loss": 2.1}')
    for name, value in metrics.items():
        if type(value) is int and value.bit_length() > 1023:
            raise UserError(f"the metric {name!r} is an int of {value.bit_length():,} bits", hint="float(value)")
        number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
        if type(name) is not str or name == METADATA or not isinstance(number, Real):
            text = f"the metric {name!r} is {value!r}, not a number under a name of its own"
            raise UserError(text, hint='metrics={"val_loss": 2.1}')
        found[name] = number if isinstance(number, bool | int) else float(number)
    return found
