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
        diff = diff_checkpoints(left, right, only=options.only, tolerance=tolerance, progress=progress)
    shown = diff.tensors if options.tensors else diff.differing
    if options.json:
        print_json(as_json(diff, shown, (left, right)))
    else:
        print_difference(diff, shown, (left, right))
    return EXIT_OK if diff.is_equal else EXIT_CHECK_FAILED


def as_json(
    diff: "CheckpointDifference", shown: "Sequence[TensorDifference]", readers: "Sequence[ChunkSource]"
) -> dict[str, Any]:
    """Return a difference as JSON holds it."""
    from ckptkit.check.elements import json_number

    def largest(tensor: "TensorDifference", value: "Largest | None") -> dict[str, Any] | None:
        return None if value is None else {"value": json_number(value.value), "index": tensor.index(value)}

    return {
        "equal": diff.is_equal,
        "left": readers[0].url,
        "right": readers[1].url,
        "num_compared": len(diff.tensors),
        "num_differing": len(diff.differing),
        "only_left": diff.only_left,
        "only_right": diff.only_right,
        "shapes": diff.shapes,
        "recorded": diff.facts,
        "tensors": [
            {
                "name": tensor.name, "equal": tensor.is_equal, "dtypes": tensor.dtypes, "shape": tensor.shape,
                "num_differing": tensor.found.num_differing,
                "largest_absolute": largest(tensor, tensor.found.absolute),
                "largest_relative": largest(tensor, tensor.found.relative),
                "left_norm": json_number(tensor.found.left_norm), "right_norm": json_number(tensor.found.right_norm),
                "difference_norm": json_number(tensor.found.norm),
            }
            for tensor in shown
        ],
    }  # fmt: skip


def print_difference(
    diff: "CheckpointDifference", shown: "Sequence[TensorDifference]", readers: "Sequence[ChunkSource]"
) -> None:
    """Print a difference: what the roots record, what cannot be compared, a table of tensors, a line in the end."""
    for side, reader in zip("AB", readers, strict=True):
        print_line(f"{side}: {reader.url}")
    recorded = [f"{name}: {_short(a)} in A, {_short(b)} in B" for name, (a, b) in diff.facts.items()]
    if recorded:
        _print_list("recorded otherwise:", recorded)
    for side, names in zip("AB", (diff.only_left, diff.only_right), strict=True):
        if names:
            _print_list(f"only in {side}:", names)
    if diff.shapes:
        _print_list("other shapes:", [f"{n}: {list(a)} in A, {list(b)} in B" for n, (a, b) in diff.shapes.items()])
    if shown:
        print_table(COLUMNS, [_cells(tensor) for tensor in shown], left=("tensor", "dtype", "at"))
    if any(tensor.dtypes[0] != tensor.dtypes[1] for tensor in shown):
        print_line("tensors of two dtypes were compared after widening both")
    equal = len(diff.tensors) - len(diff.differing)
    parts = [f"{equal:,} of {len(diff.tensors):,} compared tensors are equal, {len(diff.differing):,} differ"]
    alone = len(diff.only_left) + len(diff.only_right)
    parts += [f"{alone:,} are in one only"] if alone else []
    parts += [f"{len(diff.shapes):,} have other shapes"] if diff.shapes else []
    print_line(", ".join(parts))


def _print_list(title: str, lines: Sequence[str]) -> None:
    print_line(title)
    for line in lines[:MAX_LINES]:
        print_line(f"  {line}")
    if len(lines) > MAX_LINES:
        print_line(f"  and {len(lines) - MAX_LINES} more")


def _cells(tensor: "TensorDifference") -> tuple[str, ...]:
    diff, dtypes = tensor.found, tensor.dtypes
    largest = [
        text
        for peak in (diff.absolute, diff.relative)
        for text in (("-", "-") if peak is None else (f"{peak.value:.4g}", str(tensor.index(peak))))
    ]
    norms = (f"{norm:.6g}" for norm in (diff.left_norm, diff.right_norm, diff.norm))
    dtype = dtypes[0] if dtypes[0] == dtypes[1] else f"{dtypes[0]}, {dtypes[1]}"
    return tensor.name, dtype, f"{diff.num_differing:,}", f"{prod(tensor.shape):,}", *largest, *norms


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
