"""Mistyped URLs: what was meant for a server, and would fill a folder of the local disk."""

import os
import re

from threefold.errors import UserError, quoted

_SCHEMES = "s3|gs|gcs|az|azure|abfs|abfss|http|https"
_BROKEN = re.compile(rf"({_SCHEMES})(:(?!//)/?|//)")
_BEGINS_LIKE_ONE = re.compile(rf"({_SCHEMES}):?/")


def refuse_mistyped(place: str) -> None:
    """Raise UserError for a URL that lacks its colon or a slash, as `s3//bucket` and `s3:/bucket` do.

    A local path of that spelling which is there is taken as what it is, if it has no colon.
    """
    typo = _BROKEN.match(place)
    if typo is None or (typo[2] == "//" and os.path.lexists(place)):
        return
    what = "lacks the colon of a URL" if typo[2] == "//" else "is not a URL"
    raise UserError(
        f"{place!r} {what}, and is a strange name for a folder",
        hint=quoted(f"{typo[1]}://{place[typo.end() :].lstrip('/')}"),
    )


def url_meant(path: str) -> str | None:
    """Return the URL that a local path which does not exist was perhaps meant to be; None if it is like none."""
    typo = _BEGINS_LIKE_ONE.match(path)
    return None if typo is None or os.path.lexists(path) else f"{typo[1]}://{path[typo.end() :].lstrip('/')}"
