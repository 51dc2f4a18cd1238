"""Packages that are missing, or another's of the same name: each case is one error with the command that mends it.

An extra's package is imported where it is used, within `needed_for`. A kit is started by `start`, which first looks
whose it is: other distributions own the names `ckptkit` and `trainer` too, and any folder may bear them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from threefold.console import report
from threefold.errors import UserError
from threefold.installing import install, repair
from threefold.version import __version__

KITS = ("datakit", "ckptkit", "trainer")
EXTRA_OF = {
    "torch": "train",
    "obstore": "s3",
    "fsspec": "s3",
    "s3fs": "s3",
    "botocore": "s3",
    "pyarrow": "arrow",
    "tiktoken": "tiktoken",
    "gigatoken": "fast",
    "ray": "ray",
    "matplotlib": "plot",
    "jinja2": "plot",
    "shtab": "completion",
    "tensorstore": "tensorstore",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pynvml": "nvml",
    "lm_eval": "eval",
}


def start(kit: str) -> int:
    """Run a kit's command line, if all kits that are found here are ours; return the exit code."""
    try:
        for name in KITS:
            if fault := foreign_kit(name):
                raise fault
        with needed_for(kit):
            cli = import_module(f"{kit}.cli")
    except UserError as error:
        report(error)
        return error.exit_code
    code: int = cli.main()
    return code


datakit, ckptkit, trainer = (partial(start, kit) for kit in KITS)  # the commands


def require(package: str, what: str) -> None:
    """Raise UserError if an extra's package is not installed; nothing is imported."""
    if find_spec(package) is None:
        raise missing(package, what)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Raise what an import within lacks as a UserError that begins with `what` and names the extra."""
    try:
        yield
    except ImportError as error:
        if (fault := explained(error, what)) is None:
            raise
        raise fault from error


def missing(package: str, what: str) -> UserError:
    """Return the error for a package that is not installed, with the command that installs it."""
    return UserError(
        f"{what} needs the package {package}, which is not installed", hint=install(package, EXTRA_OF.get(package))
    )


def explained(error: ImportError, what: str = "this command") -> UserError | None:
    """Return what an import that failed means for the user; None if it is a fault of ours."""
    name = (error.name or "").partition(".")[0]
    if name in KITS:
        return foreign_kit(name) or UserError(f"the package {name} is not whole: {error}", hint=repair())
    if isinstance(error, ModuleNotFoundError) and name and find_spec(name) is None:
        return missing(name, what)
    if name in EXTRA_OF:
        return UserError(f"{what} needs the package {name}, which cannot be imported: {error}")
    return None


def foreign_kit(kit: str) -> UserError | None:
    """Return the error for a kit that is missing, or that another package shadows or overwrote.

    None if it is ours.
    """
    spec = find_spec(kit)
    if spec is None:
        return UserError(f"the package {kit} is missing", hint=repair())
    if _is_ours(spec):
        return None
    from importlib.metadata import packages_distributions

    [folder, *_] = spec.submodule_search_locations or [str(spec.origin)]
    others = sorted(set(packages_distributions().get(kit, [])) - {"threefold"})
    if others:
        return UserError(
            f"the package {kit} in {folder} is that of {' and '.join(others)}, not of threefold",
            hint=f"pip uninstall -y {' '.join(others)} && {repair()}",
        )
    return UserError(
        f"{folder} is found in place of threefold's package {kit}",
        hint=f"rename it, or start from another folder than {Path(folder).parent} and take that out of PYTHONPATH",
    )


def _is_ours(spec: ModuleSpec) -> bool:
    """Return whether a kit is beside this package and of its version."""
    if Path(spec.origin or "").parents[1:2] != Path(__file__).parents[1:2]:
        return False
    try:
        return getattr(import_module(spec.name), "__version__", None) == __version__
    except Exception:  # another's, in the place of ours
        return False
