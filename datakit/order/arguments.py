"""What a program passes to the stream's classes: another type is refused where it is passed, with what to write."""

import reprlib
from collections.abc import Sequence
from operator import index
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from datakit.format.shard import Int64s
from datakit.order.mixture import shown_limit
from datakit.store.token_store import TokenStore
from threefold.errors import UserError

T = TypeVar("T")


def require(name: str, value: object, kind: type[T], example: str) -> T:
    """Return a value of this class; UserError, whose hint is the example, if it is of another."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is of class {kind.__name__}, not {type(value).__name__}", hint=example)
    return value


def whole_number(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return a whole number of any integer type; UserError if it is not one, or not from `least` to `most`."""
    try:
        number = index(value)  # type: ignore[arg-type]  # what it is not is what the except is for
    except TypeError:
        number = least - 1
    if number < least:
        raise UserError(f"{name} is a whole number of {least} or more, not {value!r}", hint=f"{name}={least}")
    if most is not None and number > most:
        raise UserError(f"{name} is a whole number up to {most}, not {reprlib.repr(value)}", hint=f"{name}={most}")
    return number


def stores_of(sources: Sequence[tuple[TokenStore, float]]) -> list[TokenStore]:
    """Return the stores of pairs of a store and its weight; UserError if they are something else."""
    hint = "Blend([(TokenStore.open(FOLDER), 1.0)], seq_length=2048, seed=1)"
    try:
        stores = [store for store, _ in sources]
    except (TypeError, ValueError):
        raise UserError("a blend is of pairs of a store and its weight", hint=hint) from None
    if not stores:
        raise UserError("a blend of no stores", hint=hint)
    return [require("a blend's store", store, TokenStore, hint) for store in stores]


def sample_numbers(samples: npt.ArrayLike, limit: int) -> Int64s:
    """Return sample numbers as an array of its own; UserError if one is none."""
    numbers = np.array(samples, ndmin=1)
    if not numbers.size:
        raise UserError("no samples are asked for", hint="batch([0]) is the stream's first sample")
    is_whole = numbers.dtype.kind in "iu" and numbers.ndim == 1
    wide: Int64s = numbers.astype(np.int64, copy=False) if is_whole else np.array([-1])
    if not wide.view(np.uint64).max() < limit:  # as which negative ones are larger than any limit
        what = reprlib.repr(numbers.tolist())
        raise UserError(f"samples {what} are not a list of whole numbers from 0 to {shown_limit(limit)} - 1")
    return wide
