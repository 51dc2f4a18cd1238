"""The file of a tokenizer that a user named: itself, or the one in a folder; and what is said of all else."""

import os
from pathlib import Path

from datakit.files.durable import url_behind
from datakit.files.remote_file import is_url
from threefold.errors import UserError, listing, quoted
from threefold.storage.hub import download_command, folder_of, is_hub_name
from threefold.storage.mistyped import refuse_mistyped

SUFFIXES = (".json", ".model", ".tiktoken")
NAMES = tuple(f"tokenizer{suffix}" for suffix in SUFFIXES)  # as model folders and token stores have them
TRAIN_HINT = "datakit train-tokenizer INPUT... --vocab-size 32768 --output tok.json"


def tokenizer_path(place: str | os.PathLike[str]) -> Path:
    """Return the path of a tokenizer's file: the one named, or that in a folder of a model or a store.

    UserError if there is none, with what was perhaps meant and how to come by it.
    """
    named = os.fspath(place)
    refuse_mistyped(named)
    path = Path(named)
    if url := url_behind(path):
        raise _not_here(named if is_url(named) else url)
    if path.is_dir():
        return _in_folder(path)
    if os.path.lexists(path) and path.suffix not in SUFFIXES:
        raise UserError(
            f"{path} is neither a tokenizer.json nor a sentencepiece .model file nor a .tiktoken file", hint=TRAIN_HINT
        )
    if path.suffix in SUFFIXES:
        return path
    name = named.removeprefix("hf:")
    if is_hub_name(name):
        raise _on_the_hub(named, name)
    raise UserError(f"no such tokenizer: {path}", hint=TRAIN_HINT)


def _in_folder(folder: Path) -> Path:
    found = next((folder / name for name in (*NAMES, "tekken.json") if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"the folder {folder} holds no {', '.join(NAMES)}", hint=listing(folder))
    return found


def _not_here(url: str) -> UserError:
    scheme, _, rest = url.partition("://")
    if scheme == "hf":
        return _on_the_hub(url, "/".join(rest.removesuffix("/tokenizer.json").split("/")[:2]))
    return UserError(
        f"a tokenizer is a file of this machine, and {url} is not",
        hint=f"copy it to a file tok.json first, then --tokenizer tok.json; {scheme}:// is for corpora and stores",
    )


def _on_the_hub(named: str, name: str) -> UserError:
    """Return the error for the name of a model, with the command that fetches its tokenizer."""
    file = quoted(f"{folder_of(name)}/tokenizer.json")
    return UserError(
        f"{named!r} is not a file here but a name on the Hugging Face Hub, and tokenizers are read from files",
        hint=f"{download_command(name, 'tokenizer.json')}, then --tokenizer {file}",
    )
