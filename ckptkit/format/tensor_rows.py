"""Tensor rows: the lines of a root's tensor table; those of version 1 and 2 are read and checked, of 2 written."""

import json
import marshal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ckptkit.model.tensor import (
    AXES,
    ITEMSIZE,
    MAX_DIMS,
    MAX_LAYERS,
    MAX_NAME_BYTES,
    MAX_NUMEL,
    Cut,
    Placement,
    TensorInfo,
)

MAX_ROUND_TO = 1 << 20
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def tensor_lines(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the rows of a table, one line each."""
    rest: dict[object, str] = {}  # a row after the name, of which many tensors share one
    lines = []
    for info in tensors.values():
        place = info.placement
        key = (info.dtype, tuple(info.shape), place.stage, place.cuts, place.round_to, place.tied_to)
        line = rest.get(key)
        if line is None:
            line = to_json({"dtype": info.dtype, "shape": info.shape, "placement": asdict(place)})[1:]
            rest[key] = line
        lines.append(f'{{"name": {to_json(info.name)}, {line}')
    return ",\n".join(lines)


def read_tensors(rows: list[Any], version: int) -> dict[str, TensorInfo]:
    """Return the table of a root's rows; KeyError, TypeError or ValueError if one is not possible."""
    placed = _placed_in_version_1 if version == 1 else _placed
    tensors: dict[str, TensorInfo] = {}
    like: dict[bytes, TensorInfo] = {}  # by what a row says after the name, which many share; 1 and true differ
    for row in rows:
        key = marshal.dumps((row["dtype"], row["shape"], row["placement"]), 2)
        known = like.get(key)
        if known is None:
            known = TensorInfo(row["name"], row["dtype"], tuple(row["shape"]), placed(**row["placement"]))
            check_tensor(known)
            like[key] = known
        name = check_text(row["name"], MAX_NAME_BYTES)
        tensors[name] = TensorInfo(name, known.dtype, known.shape, known.placement)
    if len(tensors) != len(rows):
        raise ValueError("a tensor is listed twice")
    check_ties(tensors)
    return tensors


def check_tensor(info: TensorInfo) -> None:
    """Raise ValueError or TypeError if no root can hold this tensor."""
    name, shape, placement = check_text(info.name, MAX_NAME_BYTES), info.shape, info.placement
    if info.dtype not in ITEMSIZE or len(shape) > MAX_DIMS:
        raise ValueError(f"{name}: dtype {info.dtype!r}, shape {shape!r}")
    for size in shape:
        check_number(size, MAX_NUMEL, f"{name}: size ")
    if info.numel > MAX_NUMEL:
        raise ValueError(f"{name}: shape {shape!r}")
    if placement.stage not in ("first", "last"):
        check_number(placement.stage, MAX_LAYERS, f"{name}: stage ")
    if placement.tied_to is not None:
        check_text(placement.tied_to, MAX_NAME_BYTES)
    if placement.round_to is not None and not check_number(placement.round_to, MAX_ROUND_TO, f"{name}: round_to "):
        raise ValueError(f"{name}: round_to 0")
    if not isinstance(placement.cuts, tuple):
        raise TypeError(f"{name}: cuts {placement.cuts!r} instead of a tuple of Cut")
    for cut in placement.cuts:
        _check_cut(cut, info)
    if len(placement.cuts) > 1:
        axes = [cut.axis for cut in placement.cuts]
        if len(set(axes)) < len(axes) or {"ep", "cp"} <= set(axes):
            raise ValueError(f"{name}: cut by {' and '.join(axes)}, whose parts together leave some out")


def check_ties(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError if a tensor is tied to one that cannot hold its values."""
    for info in tensors.values():
        if info.placement.tied_to is None:
            continue
        target = tensors.get(info.placement.tied_to)
        if target is None or target.placement.tied_to or (target.dtype, target.shape) != (info.dtype, info.shape):
            raise ValueError(f"{info.name} is tied to {info.placement.tied_to!r}")


def check_number(value: object, limit: int, what: str = "") -> int:
    """Return a value that is a whole number up to a limit; else ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"{what}{value!r} is not a whole number up to {limit}")
    return value


def check_text(value: object, max_bytes: int) -> str:
    """Return a value that is a text of 1 to `max_bytes` bytes; else ValueError."""
    if not isinstance(value, str) or not 0 < len(value.encode()) <= max_bytes:
        raise ValueError(f"{value!r} is not a text of 1 to {max_bytes} bytes")
    return value


def _check_cut(cut: Cut, info: TensorInfo) -> None:
    if not isinstance(cut, Cut) or cut.axis not in AXES:
        raise ValueError(f"{info.name}: cut {cut!r}")
    if check_number(cut.dim, MAX_DIMS, f"{info.name}: dim ") >= len(info.shape):
        raise ValueError(f"{info.name}: shape {info.shape!r}, cut along {cut.dim}")
    if cut.max_parts is None:
        return
    most = check_number(cut.max_parts, MAX_NUMEL, f"{info.name}: max_parts ")
    if most == 0 or (info.placement.round_to is None and info.shape[cut.dim] % most):
        raise ValueError(f"{info.name}: shape {info.shape!r} is not of {most} equal parts along {cut.dim}")


def _placed(*, stage: Any, cuts: list[dict[str, Any]], round_to: Any, tied_to: Any) -> Placement:
    return Placement(stage, tuple([_cut(**cut) for cut in cuts]), round_to, tied_to)


def _cut(*, dim: Any, axis: Any, max_parts: Any) -> Cut:
    return Cut(dim, axis, max_parts)


def _placed_in_version_1(
    stage: Any, dim: int | None = None, axis: Any = "tp", padded: bool = False, tied_to: str | None = None
) -> Placement:
    """Return the placement that version 1 wrote: one cut at most, with a round_to of 1 or without one."""
    if axis not in ("tp", "ep") or not isinstance(padded, bool):
        raise ValueError(f"a placement by {axis!r}, padded {padded!r}")
    if dim is None:
        return Placement(stage, tied_to=tied_to)
    return Placement(stage, (Cut(dim, axis),), 1 if padded else None, tied_to)
