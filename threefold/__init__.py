"""Ground floor of the three kits: storage, native library loading, child Pythons, errors and the CLI voice."""

from threefold.lazy import lazy_names
from threefold.version import __version__ as __version__

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
