"""The errors a user can meet: one sentence with the values and the place, a hint that can be pasted, an exit code."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from threefold.masking import masked

EXIT_OK, EXIT_CHECK_FAILED, EXIT_USAGE, EXIT_IO = 0, 1, 2, 3


class UserError(ValueError):
    """A fault in what the user gave: flags, configuration, input data, a checkpoint that does not fit.

    Passwords of URLs are masked in message and hint.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = masked(message)
        self.hint: str | None = hint and masked(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


class CheckFailed(UserError):
    """A check that the user asked for found a difference or damage."""

    exit_code = EXIT_CHECK_FAILED


class StorageError(UserError):
    """Reading or writing failed: disk full, no permission, server gone, object missing."""

    exit_code = EXIT_IO


def listed(faults: Sequence[str], most: int = 30) -> str:
    """Faults for the end of a message, an indented line each: the first ones and the number of the others."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "".join(f"\n  {fault}" for fault in [*faults[:most], *more])


def quoted(place: object) -> str:
    r"""Return a path or a URL as one word of a hint's command: with quotes, if a shell needs them.

    What cannot be printed is escaped as bash reads it: the byte 0xff of a name is `$'\xff'`.
    """
    text = str(place)
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escaped, text))}'"


def is_utf8(text: str) -> bool:
    """Return whether a text, as the name of a file may not, has an encoding in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    handler = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=handler))


def listing(place: object) -> str:
    """Return a hint's command that lists a path, or the nearest folder above it that is there."""
    path = Path(str(place))
    return f"ls {quoted(next(folder for folder in (path, *path.parents, Path('.')) if os.path.exists(folder)))}"


def _rebuild(kind: type[UserError], message: str, hint: str | None) -> UserError:
    return kind(message, hint=hint)
