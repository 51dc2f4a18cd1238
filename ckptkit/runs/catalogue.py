"""Catalogue: which steps of a run are committed, derived by listing roots; nothing else says what is the newest.

One listing of the run's folder and one look-up a step.
"""

from concurrent.futures import ThreadPoolExecutor

from ckptkit.address import open_address
from ckptkit.format.root import ROOT_KEY, parse_step_folder, step_folder
from threefold.errors import UserError
from threefold.storage import Storage

NUM_LOOKUPS_AT_ONCE = 8


def step_folders(storage: Storage) -> list[int]:
    """The steps that have a folder, committed or not, ascending."""
    found = (parse_step_folder(name) for name in storage.list_folders())
    return sorted(step for step in found if step is not None)


def committed_steps(storage: Storage) -> list[int]:
    """The steps whose root exists, ascending."""
    steps = step_folders(storage)
    with ThreadPoolExecutor(NUM_LOOKUPS_AT_ONCE) as pool:
        roots = pool.map(lambda step: storage.info(f"{step_folder(step)}/{ROOT_KEY}"), steps)
        return [step for step, root in zip(steps, roots, strict=True) if root is not None]


def latest_step(storage: Storage) -> int | None:
    """The newest committed step, None where there is none."""
    steps = committed_steps(storage)
    return steps[-1] if steps else None


def resolve(url: str) -> tuple[Storage, int]:
    """The run's storage and the step that an address means: the one it names, or the run's newest committed one.

    UserError where no step is committed there.
    """
    storage, step = open_address(url)
    if step is None:
        step = latest_step(storage)
    elif storage.info(f"{step_folder(step)}/{ROOT_KEY}") is None:
        raise UserError(f"{storage.url} holds no committed step {step}", hint=f"ckptkit ls {storage.url}")
    if step is None:
        raise UserError(f"{storage.url} holds no committed step", hint=f"check the URL: ckptkit ls {storage.url}")
    return storage, step
