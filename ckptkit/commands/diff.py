"""`ckptkit diff`: how the tensors of two checkpoints differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckptkit.commands.shared import CKPT_HELP, OfTensors, Reporting, opened, shown_bytes
from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK
from threefold.options import argument, option

if TYPE_CHECKING:
    from ckptkit.check.diff import CheckpointDifference, Largest, TensorDifference
    from ckptkit.loading.chunk_source import ChunkSource

COLUMNS = (
    "tensor", "dtype", "differing", "of", "largest abs", "at", "largest rel", "at", "norm A", "norm B", "norm A-B",
)  # fmt: skip
MAX_VALUE, MAX_LINES = 40, 30  # letters of what a root records, lines of a list


@dataclass(frozen=True, kw_only=True)
class Options(Reporting, OfTensors):
    """Options of `ckptkit diff`."""

    left: str = argument("A", CKPT_HELP)
    right: str = argument("B", "the checkpoint to compare with it")
    tensors: bool = option(False, "list every tensor, equal ones too")
    rtol: float | None = option(None, "elements are equal up to this relative difference", minimum=0, metavar="X")
    atol: float | None = option(None, "elements are equal up to this absolute difference", minimum=0, metavar="X")


def run(options: Options) -> int:
    """Compare two checkpoints tensor by tensor, whatever their layouts, and name those that differ, those that differ
    most first (then the exit code is 1). Elements are equal if their bits are; with --rtol or --atol those within one
    of both are, and tensors may have other dtypes. A relative difference is that by the larger magnitude.
    """
    from ckptkit.check.diff import Tolerance, diff_checkpoints
    from ckptkit.io.blocks import keep_small_frees

    tolerance = None
    if options.rtol is not None or options.atol is not None:
        tolerance = Tolerance(options.rtol or 0.0, options.atol or 0.0)
    keep_small_frees()
    with opened(options.left) as left, opened(options.right) as right, shown_bytes() as progress:
        found = diff_checkpoints(left, right, only=options.only, tolerance=tolerance, progress=progress)
    shown = found.tensors if options.tensors else found.differing
    if options.json:
        print_json(as_json(found, shown, (left, right)))
    else:
        print_difference(found, shown, (left, right))
    return EXIT_OK if found.is_equal else EXIT_CHECK_FAILED


def as_json(
    found: "CheckpointDifference", shown: "Sequence[TensorDifference]", readers: "Sequence[ChunkSource]"
) -> dict[str, Any]:
    """Return a difference as JSON holds it."""
    from ckptkit.check.elements import json_number

    def largest(tensor: "TensorDifference", value: "Largest | None") -> dict[str, Any] | None:
        return None if value is None else {"value": json_number(value.value), "index": tensor.index(value)}

    return {
        "equal": found.is_equal,
        "left": readers[0].url,
        "right": readers[1].url,
        "num_compared": len(found.tensors),
        "num_differing": len(found.differing),
        "only_left": found.only_left,
        "only_right": found.only_right,
        "shapes": found.shapes,
        "recorded": found.facts,
        "tensors": [
            {
                "name": each.name, "equal": each.is_equal, "dtypes": each.dtypes, "shape": each.shape,
                "num_differing": each.found.num_differing,
                "largest_absolute": largest(each, each.found.absolute),
                "largest_relative": largest(each, each.found.relative),
                "left_norm": json_number(each.found.left_norm), "right_norm": json_number(each.found.right_norm),
                "difference_norm": json_number(each.found.norm),
            }
            for each in shown
        ],
    }  # fmt: skip


def print_difference(
    found: "CheckpointDifference", shown: "Sequence[TensorDifference]", readers: "Sequence[ChunkSource]"
) -> None:
    """Print a difference: what the roots record, what cannot be compared, a table of tensors, a line in the end."""
    for side, reader in zip("AB", readers, strict=True):
        print_line(f"{side}: {reader.url}")
    recorded = [f"{name}: {_short(a)} in A, {_short(b)} in B" for name, (a, b) in found.facts.items()]
    if recorded:
        _print_list("recorded otherwise:", recorded)
    for side, names in zip("AB", (found.only_left, found.only_right), strict=True):
        if names:
            _print_list(f"only in {side}:", names)
    if found.shapes:
        _print_list("other shapes:", [f"{n}: {list(a)} in A, {list(b)} in B" for n, (a, b) in found.shapes.items()])
    if shown:
        print_table(COLUMNS, [_cells(each) for each in shown], left=("tensor", "dtype", "at"))
    if any(each.dtypes[0] != each.dtypes[1] for each in shown):
        print_line("tensors of two dtypes were compared after widening both")
    equal = len(found.tensors) - len(found.differing)
    parts = [f"{equal:,} of {len(found.tensors):,} compared tensors are equal, {len(found.differing):,} differ"]
    alone = len(found.only_left) + len(found.only_right)
    parts += [f"{alone:,} are in one only"] if alone else []
    parts += [f"{len(found.shapes):,} have other shapes"] if found.shapes else []
    print_line(", ".join(parts))


def _print_list(title: str, lines: Sequence[str]) -> None:
    print_line(title)
    for line in lines[:MAX_LINES]:
        print_line(f"  {line}")
    if len(lines) > MAX_LINES:
        print_line(f"  and {len(lines) - MAX_LINES} more")


def _cells(tensor: "TensorDifference") -> tuple[str, ...]:
    found, dtypes = tensor.found, tensor.dtypes
    largest = [
        text
        for each in (found.absolute, found.relative)
        for text in (("-", "-") if each is None else (f"{each.value:.4g}", str(tensor.index(each))))
    ]
    norms = (f"{norm:.6g}" for norm in (found.left_norm, found.right_norm, found.norm))
    dtype = dtypes[0] if dtypes[0] == dtypes[1] else f"{dtypes[0]}, {dtypes[1]}"
    return tensor.name, dtype, f"{found.num_differing:,}", f"{prod(tensor.shape):,}", *largest, *norms


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
