"""What a message shows of foreign data: few characters, whatever the data is; no object of it is printed whole."""

from typing import Any

MAX_CHARACTERS, MAX_PARTS = 100, 3
SCALARS = (str, bytes, bool, int, float, type(None))


def shown(value: Any) -> str:
    """Return a value in words: a short number, the beginning of a text, else what it is one of."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 64 else f"a number of {value.bit_length():,} bits"
    if isinstance(value, str | bytes):
        rest = f" and {len(value) - MAX_CHARACTERS:,} more" if len(value) > MAX_CHARACTERS else ""
        start = value[:MAX_CHARACTERS]
        return f"{(start if isinstance(start, bytes) else str(start))!r}{rest}"
    named = getattr(value, "name", None)
    if isinstance(named, str):
        return shown(str(named))
    if type(value) in (list, tuple) and len(value) <= MAX_PARTS and all(type(each) in SCALARS for each in value):
        return f"[{', '.join(map(shown, value))}]"
    size = f" of {len(value):,}" if isinstance(value, list | tuple | dict | set | frozenset) else ""
    return f"a {type(value).__name__}{size}"


def said(error: BaseException) -> str:
    """Return what an exception says that foreign data led to, in few characters."""
    if isinstance(error, KeyError) and error.args:
        return f"it has no {shown(error.args[0])}"
    if isinstance(error, EOFError):
        return "it ends too early"
    text = str(error)
    return f"{text[:MAX_CHARACTERS]}..." if len(text) > MAX_CHARACTERS + 3 else text or type(error).__name__
