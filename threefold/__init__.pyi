from threefold.errors import CheckFailed as CheckFailed
from threefold.errors import StorageError as StorageError
from threefold.errors import UserError as UserError
from threefold.storage import Storage as Storage
from threefold.storage import open_storage as open_storage

__version__: str
