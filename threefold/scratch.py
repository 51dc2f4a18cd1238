"""Folders that a program fills and may empty or remove again: it made them itself."""

import shutil
from pathlib import Path

from threefold.console import log
from threefold.debug import VARIABLE, is_debugging
from threefold.errors import StorageError, UserError

MARKER = ".made-by"


def is_kept(folder: Path) -> bool:
    """Return whether scratch that holds anything stays where it is, as THREEFOLD_DEBUG=1 asks.

    It is named on stderr.
    """
    if not is_debugging() or not folder.is_dir() or not any(folder.iterdir()):
        return False
    log(f"{VARIABLE}: {folder} is kept")
    return True


def fresh_folder(folder: Path, program: str) -> Path:
    """Make `folder`, or empty it if `program` made it, which a marker file says; return its absolute path.

    A folder that is empty is taken; UserError for one of other files, a link or a file, nothing of which is touched.
    """
    folder = folder.absolute()
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise _refusal(folder, "is not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        marker, found = folder / MARKER, list(folder.iterdir())
        if found and not _is_made_by(marker, program):
            raise _refusal(folder, f"holds files that {program} did not make, such as {min(found).name}")
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != marker:  # it stays until the end, so that a run which is killed here can be repeated
                path.unlink()
        marker.write_text(f"{program}\n")
    except OSError as error:
        raise StorageError(f"cannot empty {folder}: {error}") from error
    return folder


def _is_made_by(marker: Path, program: str) -> bool:
    return marker.is_file() and not marker.is_symlink() and marker.read_bytes() == f"{program}\n".encode()


def _refusal(folder: Path, what: str) -> UserError:
    return UserError(f"{folder} {what}; nothing was deleted", hint="name a folder that does not exist yet")
