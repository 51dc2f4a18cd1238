"""trainer: a compact tensor x pipeline x data parallel GPT trainer."""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
