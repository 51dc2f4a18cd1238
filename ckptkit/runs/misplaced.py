"""What was named where a run of checkpoints was meant: a token store, another program's folder, a file of a step.

Looked at only once no step was found; costs some lookups and a listing of names.
"""

from pathlib import Path
from shlex import quote

from ckptkit.format.address import STORE_NAMES
from ckptkit.format.keys import parse_step_folder, step_folder, step_like
from threefold.errors import StorageError, UserError
from threefold.storage import Storage
from threefold.storage.folders import local_root

FOREIGN_NAMES = {"config.json": "hf", ".metadata": "dcp"}


def not_a_run(storage: Storage) -> UserError | None:
    """Return the error that names what else is at a URL, None if that is not known."""
    url = storage.url
    for folder in ("", "train/", "valid/"):
        if any(storage.info(f"{folder}{name}") for name in STORE_NAMES):
            place = f"{url}/{folder}".rstrip("/")
            return UserError(
                f"{url} is {'a token store' if not folder else 'of token stores'}, not a run of checkpoints",
                hint=f"datakit inspect {quote(place)}",
            )
    for name, kind in FOREIGN_NAMES.items():
        if storage.info(name):
            return UserError(
                f"{url} is a folder of another program, by its {name}, not a run",
                hint=f"ckptkit inspect {quote(f'{kind}:{url}')}",
            )
    root = local_root(storage)
    return None if root is None else _in_a_run(root)


def _in_a_run(path: Path) -> UserError | None:
    """Return the error for a path below a run that is not a step's: a file of one, or its number written otherwise."""
    step = next((each for each in path.parents if parse_step_folder(each.name) is not None), None)
    if step is not None:
        return UserError(f"{path} holds no committed step: it is below one, which is meant", hint=quote(str(step)))
    number = int(path.name) if path.name.isdecimal() and len(path.name) < 16 else step_like(path.name)
    if number is None or path.exists() or not path.parent.is_dir():
        return None
    right = path.with_name(step_folder(number))
    others = [each for each in path.parent.iterdir() if parse_step_folder(each.name) is not None]
    if not others:
        return None
    there = "" if right.is_dir() else f", which is not there either; {len(others)} others are"
    return StorageError(
        f"{path} does not exist: the folder of step {number} is {right.name}{there}",
        hint=quote(str(right)) if right.is_dir() else f"ckptkit ls {quote(str(path.parent))}",
    )
