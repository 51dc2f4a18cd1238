"""trainer: a compact tensor x pipeline x data parallel GPT trainer."""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

# `trainer.train.train` shares its module's name and is imported from there.
__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
