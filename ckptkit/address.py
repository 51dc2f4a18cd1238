"""Addresses of checkpoints: a run URL means its newest committed step, `RUN/step-000000100` one step."""

from ckptkit.catalogue import latest_step
from ckptkit.root import ROOT_KEY, parse_step_folder
from threefold.errors import UserError
from threefold.storage import Storage, open_storage


def split_address(url: str) -> tuple[str, int | None]:
    """The run URL, and the step where the address names one."""
    run, _, last = url.rstrip("/").rpartition("/")
    step = parse_step_folder(last)
    if step is None:
        return url, None
    return run or ("/" if url.startswith("/") else "."), step


def open_address(url: str) -> tuple[Storage, int | None]:
    """The storage of the run, and the step where the address names one."""
    run, step = split_address(url)
    return open_storage(run), step


def resolve(url: str) -> tuple[Storage, int]:
    """The storage of the run and the committed step that an address means; UserError where there is none."""
    storage, step = open_address(url)
    if step is None:
        step = latest_step(storage)
    if step is not None:
        return storage, step
    path = storage.local_path(ROOT_KEY)
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{storage.url} does not exist", hint=f"ls {path.parent.parent}")
    raise UserError(
        f"{storage.url} holds no committed checkpoint", hint="give a run's URL, or a step's: RUN/step-000000100"
    )
