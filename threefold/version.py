"""The version of the distribution, which the files of this package import from here."""

__version__ = "0.1.0"
