"""What a message shows of foreign data: few characters, whatever the data is; no object of it is printed whole."""

from typing import Any

MAX_CHARACTERS, MAX_PARTS = 100, 3
SCALARS = (str, bytes, bool, int, float, type(None))


def shown(value: Any) -> str:
    """Return a value in words: a short number, the beginning of a text, else what it is one of."""
    match value:
        case None | bool() | float():
            return repr(value)
        case int():
            return repr(value) if value.bit_length() <= 64 else f"a number of {value.bit_length():,} bits"
        case str() | bytes():
            rest = f" and {len(value) - MAX_CHARACTERS:,} more" if len(value) > MAX_CHARACTERS else ""
            return f"{(value if isinstance(value, bytes) else str(value))[:MAX_CHARACTERS]!r}{rest}"
        case object(name=str(name)):
            return shown(str(name))
        case list() | tuple() if len(value) <= MAX_PARTS and all(type(part) in SCALARS for part in value):
            return f"[{', '.join(map(shown, value))}]"
        case list() | tuple() | dict() | set() | frozenset():
            return f"a {type(value).__name__} of {len(value):,}"
        case _:
            return f"a {type(value).__name__}"


def words_of(error: BaseException) -> str:
    """Return what an exception says that foreign data led to, in few characters."""
    match error:
        case KeyError(args=[key, *_]):
            return f"it has no {shown(key)}"
        case EOFError():
            return "it ends too early"
    text = str(error)
    return f"{text[:MAX_CHARACTERS]}..." if len(text) > MAX_CHARACTERS + 3 else text or type(error).__name__
