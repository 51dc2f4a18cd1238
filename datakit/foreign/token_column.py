"""Token column: which column (of MDS) or leaf (of litdata) of a dataset's samples holds tokens, its bytes and dtype."""

from collections.abc import Callable, Sequence

from datakit.foreign.exact_reader import ExactReader, damaged
from datakit.foreign.foreign_store import Choices
from threefold.errors import UserError


def choose_column(
    place: str,
    noun: str,
    columns: Sequence[tuple[str, str]],
    may_hold_tokens: Callable[[str], bool],
    choices: Choices,
    *,
    kinds: str,
    how: str,
) -> int:
    """Return the number of the column that `choices` names, else of the only one that may hold tokens by its encoding.

    `columns` are names and encodings, `kinds` the encodings that will do, `how` the hint where none does. UserError
    says at which `place` there is no such column, and what there is.
    """
    names = [name for name, _ in columns]
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in columns) or "none"
    fitting = [number for number, (_, encoding) in enumerate(columns) if may_hold_tokens(encoding)]
    if choices.column is not None:
        if choices.column not in names:
            raise UserError(f"{place} has no {noun} {choices.column!r}, it has {shown}", hint="choose another --column")
        number = names.index(choices.column)
        if number not in fitting:
            encoding = columns[number][1]
            why = "pickle is never loaded" if _is_pickled(encoding) else f"tokens are {kinds}"
            raise UserError(f"{place}: {noun} {choices.column!r} is {encoding}; {why}", hint=how)
        return number
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"{place} has more than one {noun} that may hold tokens: {shown}", hint=f"--column {names[fitting[0]]}"
        )
    why = "; pickle is never loaded" if any(_is_pickled(encoding) for _, encoding in columns) else ""
    raise UserError(f"{place} has no {noun} that may hold tokens: {shown}{why}", hint=how)


def read_column(
    reader: ExactReader, size_bytes: int, sizes: Sequence[int | None], number: int, sample: str, noun: str
) -> tuple[int, bytes]:
    """Return where a column of a sample begins, and its bytes; `reader` passes from the sample's begin to its end.

    `sizes` are those of all columns in bytes, None for each whose size is a u32 at the sample's begin.
    """
    stop, num_sizes = reader.at + size_bytes, sizes.count(None)
    if 4 * num_sizes > size_bytes:
        raise damaged(f"{sample} has {size_bytes} bytes, too few for the sizes of its {noun}")
    variable = iter(reader.offsets(num_sizes).tolist())
    known: list[int] = [next(variable) if size is None else size for size in sizes]
    if sum(known) != stop - reader.at:
        raise damaged(f"{sample} has {noun} of {known} bytes in {size_bytes}")
    reader.skip(sum(known[:number]))
    at, data = reader.at, reader.read(known[number])
    reader.skip(stop - reader.at)
    return at, data


def require_dtype(what: str, found: str, choices: Choices, *, is_raw: bool) -> None:
    """Raise UserError if raw bytes lack a dtype in `choices`, or where it is not the one that was `found`."""
    if is_raw and choices.dtype is None:
        raise UserError(
            f"{what} is raw bytes, which do not say the tokens' dtype",
            hint="--dtype int64, or what the writer called tobytes() on",
        )
    if not is_raw and choices.dtype not in (None, found):
        raise UserError(f"{what} is {found}, not {choices.dtype}", hint="leave out --dtype")


def _is_pickled(encoding: str) -> bool:
    return encoding == "pkl" or "pickle" in encoding
