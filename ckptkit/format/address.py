"""Addresses of checkpoints: a run URL means its newest committed step, `RUN/step-000000100` one step.

`dcp:FOLDER` and its like mean a folder of another program, for verbs that read those; here they are refused.
"""

from shlex import quote

from ckptkit.format.keys import parse_step_folder, step_folder, step_like
from threefold.errors import UserError
from threefold.storage import Storage, open_storage
from threefold.storage.folders import local_root

# what addresses of other programs' folders begin with
FOREIGN = ("hf", "safetensors", "dcp", "torch_dist", "torch_checkpointing", "ucp", "tensorstore")
STORE_NAMES = ("manifest.json", "archive.json")  # a file of either name makes a folder a token store


def foreign_kind(url: str) -> str | None:
    """Return the program that a folder is of by its address, None if it means a run; `hf://` is a URL of fsspec's."""
    kind, colon, rest = url.partition(":")
    return kind if colon and kind in FOREIGN and not rest.startswith("//") else None


def split_address(url: str) -> tuple[str, int | None]:
    """Return the run URL, and the step where the address names one; UserError for another program's folder."""
    if kind := foreign_kind(url):
        folder = quote(url.partition(":")[2] or "FOLDER")
        raise UserError(
            f"{url!r} is a folder of another program, not a run; inspect, diff, hash and export read it as it is",
            hint=f"make a run of it: ckptkit import {folder} RUN --from {kind}; a folder of that name: ./{quote(url)}",
        )
    run, _, last = url.rstrip("/").rpartition("/")
    step = parse_step_folder(last)
    if step is None:
        return url, None
    return run or ("/" if url.startswith("/") else "."), step


def open_address(url: str, *, write_memory_bytes: int | None = None) -> tuple[Storage, int | None]:
    """Return the storage of the run, and the step where the address names one; the bound is open_storage's."""
    run, step = split_address(url)
    return open_storage(run, write_memory_bytes=write_memory_bytes), step


def open_target(url: str, *, write_memory_bytes: int | None = None) -> tuple[Storage, int | None]:
    """Return what open_address does, of a place that is written to; UserError for a step that is named otherwise."""
    run, _, last = url.rstrip("/").rpartition("/")
    if (number := step_like(last)) is not None and parse_step_folder(last) is None:
        raise UserError(
            f"{url} is neither a run nor a step: the folder of step {number} is {step_folder(number)}",
            hint=f"{quote(run or '.')}/{step_folder(number)}",
        )
    storage, step = open_address(url, write_memory_bytes=write_memory_bytes)
    root = local_root(storage)
    is_store = root is not None and any((root / name).is_file() for name in STORE_NAMES)
    if is_store and not any(parse_step_folder(name) is not None for name in storage.list_folders()):
        raise UserError(
            f"{storage.url} is a token store, and a run has a folder of its own",
            hint=f"choose another, such as {quote(f'{storage.url}-run')}",
        )
    return storage, step


def open_run(url: str) -> Storage:
    """Return the storage that a run is saved to; UserError where the address names one step."""
    storage, step = open_target(str(url))
    if step is not None:
        raise UserError(f"{url} names one step, a run is saved to a folder of steps", hint=quote(storage.url))
    return storage
