"""Public names that a package imports at their first use, so that no part of it pays for another."""

from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, given its `__file__`.

    Its public names are those of the stub beside that file, which type checkers read: a line for each,
    `from MODULE import NAME as NAME`. Only what Python has loaded by then is imported here: any other module's name
    might be a file of the user's.
    """
    with open(f"{file}i", encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from ")]
    modules = {name: module for _, module, _, name, *_ in imports}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    def names() -> list[str]:
        return sorted(["__version__", *modules])

    return sorted(modules), get, names
