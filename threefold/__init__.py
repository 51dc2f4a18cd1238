"""Ground floor of the three kits: storage, native library loading, errors and the CLI voice."""

__version__ = "0.1.0"
