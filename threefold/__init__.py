"""Ground floor of the three kits: storage, native library loading, child Pythons, errors and the CLI voice."""

from threefold.lazy import lazy_names
from threefold.version import __version__ as __version__

TYPE_CHECKING = False  # what type checkers take for true; `typing` might be a file of the user's

if TYPE_CHECKING:
    from threefold.errors import CheckFailed as CheckFailed
    from threefold.errors import StorageError as StorageError
    from threefold.errors import UserError as UserError
    from threefold.storage import Storage as Storage
    from threefold.storage import open_storage as open_storage
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "CheckFailed": "errors",
            "Storage": "storage",
            "StorageError": "errors",
            "UserError": "errors",
            "open_storage": "storage",
        },
    )
