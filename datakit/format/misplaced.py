"""What was named where a token store was meant: a checkpoint, text, a file, a URL without its colon."""

import os
from pathlib import Path

from datakit.text.finding import checkpoint_in
from datakit.text.formats import format_of
from threefold.errors import UserError, listing, quoted
from threefold.storage.mistyped import url_meant


def not_a_store(place: Path, manifest_name: str) -> UserError:
    """Return the error for a local place without a manifest, which says what is there if that is known."""
    what = f"{place} is not a token store"
    if url := url_meant(str(place)):
        return UserError(f"{what}: nothing has that name here, and a URL has a colon", hint=quoted(url))
    if not os.path.lexists(place):
        return UserError(f"{what}: nothing has that name", hint=listing(place))
    if place.name == manifest_name:
        return UserError(f"{what} but the manifest of one", hint=f"datakit inspect {quoted(place.parent)}")
    if checkpoint := checkpoint_in(str(place)):
        return UserError(f"{what} but {checkpoint}", hint=f"ckptkit inspect {quoted(place)}")
    if text := _text_of(place):
        return UserError(
            f"{what} but {text}", hint=f"datakit preprocess {quoted(place)} --output STORE --tokenizer tok.json"
        )
    if place.is_file():
        return UserError(f"{what} but a file, and a store is a folder", hint=listing(place))
    return UserError(f"{what}: it has no {manifest_name}", hint=listing(place))


def _text_of(place: Path) -> str | None:
    """Return in words which text a place is or holds, None if it is none."""
    if place.is_file():
        return "text" if _is_text(place.name) else None
    name = next(filter(_is_text, sorted(os.listdir(place))), None)
    return name and f"a folder of text, such as {name}"


def _is_text(name: str) -> bool:
    """Return whether a name is one of text, as that of a `.json` need not be."""
    return format_of(name) is not None and not name.endswith(".json")
