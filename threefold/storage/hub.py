"""Names on the Hugging Face Hub: what looks like one, and the command that brings what has it to this machine."""

import re

from threefold.errors import quoted

SCHEME = "hf://"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_REPOSITORIES = {"datasets": "dataset", "spaces": "space"}  # as URLs begin, and as the command names them


def is_hub_name(text: str) -> bool:
    """Return whether a text may be the name of a model: `gpt2` or `OWNER/MODEL`."""
    return _NAME.fullmatch(text) is not None


def download_command(place: str, file: str = "") -> str:
    """Return the command that fetches a model, by its name or hf:// URL, or one file of it, into a folder here."""
    parts = place.removeprefix(SCHEME).split("/")
    repository = _REPOSITORIES.get(parts[0], "")
    name = "/".join(parts[1:3] if repository else parts[:2])
    words = [quoted(name), *([file] if file else []), *([f"--repo-type {repository}"] if repository else [])]
    return f"hf download {' '.join(words)} --local-dir {quoted(folder_of(name))}"


def folder_of(name: str) -> str:
    """Return the folder that `download_command` fills: the name without its owner."""
    return name.rpartition("/")[2]
