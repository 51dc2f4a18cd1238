"""Quarantine: a step that was found damaged stops counting as committed, and can be saved again."""

from ckptkit.format.keys import DAMAGED_ROOT_KEY, step_folder
from ckptkit.loading.roots import attempt_seen, is_medium_error, root_info, root_key
from threefold.errors import StorageError
from threefold.storage import Storage


def quarantine(storage: Storage, step: int, attempt: str | None = None) -> bool:
    """Keep the root of a step as damaged-root.json, so that the step is not committed; return False if it was not.

    With an attempt, as `attempt_seen` returned it, False too if the step is another one's by now.
    """
    key, kept = root_key(step), f"{step_folder(step)}/{DAMAGED_ROOT_KEY}"
    if root_info(storage, step) is None or (attempt is not None and attempt_seen(storage, step) != attempt):
        return False
    try:
        storage.copy(key, kept)
    except StorageError as error:
        if not is_medium_error(error):
            raise
        storage.write(kept, b"")  # the disk cannot return this root
    storage.delete([key])
    return True
