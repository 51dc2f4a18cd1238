"""What may be printed or stored of a text: no password of a URL, no control character.

Masked are user and password in front of a host (`ftp://***@host/x`), and the values of query fields that give access
(`?X-Amz-Signature=***`). A port, a user without a password and an `@` of a path stay, as do Azure's containers
(`abfs://container@account`). Cost: one search of a text that has no "://" or "=".
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# A password may hold "/" and "@"; a number before "/", "?" or "#" is a port, and what follows is not a password.
_USERINFO = re.compile(
    r"""(?<=://)(?:[^\s/@:'"<>]*:(?!\d+(?:[/?#]|$))[^\s'"<>]*?@(?:[^\s/@'"<>]*@)*)|(?<=http://|ttps://)[^\s/@:'"<>]+@"""
)
_FIELD = re.compile(
    r"""([?&;](?:[a-z0-9]+[-_.])*(?:signature|sig|credential|token|secret|password|passwd|pwd|api-?key|accesskeyid)=)"""
    r"""[^\s&;#'"<>]+""",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Return the text without passwords and signatures of the URLs in it."""
    if "://" in text and "@" in text:
        text = _USERINFO.sub(f"{MASK}@", text)
    if "=" in text:
        text = _FIELD.sub(rf"\1{MASK}", text)
    return text


def masked_values(value: Any) -> Any:
    """Return the same value of dicts, lists and texts, all texts masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {masked_values(key): masked_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(item) for item in value]
    return value


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text masked, with escapes for all that a terminal would act on; line ends stay with `lines`."""
    text = masked(text)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else each.encode("unicode_escape").decode()
        for each in text
    )


def shown_cause(error: BaseException) -> BaseException | None:
    """Return the error itself as the cause of another, None if its text would show a password in a traceback."""
    return error if masked(str(error)) == str(error) else None
