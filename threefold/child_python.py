"""Child Pythons: how this program starts another Python, which imports nothing from the user's current folder.

`python -m` and `python SCRIPT` put a folder of the user's before the standard library, where a `numpy.py` or `json.py`
of theirs would be executed in our place. That folder stays only if this very package was found in it.
"""

import os
import sys  # nothing else is imported: it might come from such a folder

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def python_command(module: str) -> list[str]:
    """Return the command line that runs a module without the current folder on the path."""
    return [sys.executable, "-P", "-m", module]


def search_path() -> list[str]:
    """Return where a child finds what this process finds: `sys.path` without the user's own folders."""
    left_out = [folder for folder in _folders_of_the_user() if folder != _HOME]
    return [entry for entry in sys.path if os.path.isabs(entry) and os.path.realpath(entry) not in left_out]


def forget_current_folder() -> None:
    """Import from no folder of the user's from now on, for `python -m` of a command of ours."""
    sys.path[:] = search_path()


def _folders_of_the_user() -> list[str]:
    """Return the current folder and the main script's, resolved."""
    folders = []
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None:  # else a session, or run by `python -m`
        folders.append(os.path.dirname(os.path.realpath(script)))
    try:  # noqa: SIM105  # contextlib might be the user's
        folders.append(os.getcwd())
    except FileNotFoundError:  # it was deleted
        pass
    return folders
