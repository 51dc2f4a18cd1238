"""What to type so that a package is there. The project is on no index, so no command names it there."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlparse

NEWER = "install a newer threefold: its wheel, or in a clone: git pull && pip install -e ."


def install(package: str, extra: str | None = None) -> str:
    """Return the command that installs a package, or all that an extra needs of the index."""
    wanted = requirements(extra) if extra else []
    return f"pip install {' '.join(json.dumps(each) for each in wanted or [package])}"


def requirements(extra: str) -> list[str]:
    """Return what an extra names, as `torch>=2.11`; nothing if this is not installed."""
    try:
        lines = distribution("threefold").requires or []
    except PackageNotFoundError:
        return []
    parts = [line.replace('"', "'").split(";") for line in lines]
    named = f"extra == '{extra}'"
    return [part[0].strip() for part in parts if len(part) == 2 and named in part[1] and "threefold[" not in part[0]]


def repair() -> str:
    """Return the command that installs this once more, of the folder or file that it was installed of."""
    source = "threefold-*.whl"
    try:
        installed = json.loads(distribution("threefold").read_text("direct_url.json") or "{}")
        if (url := urlparse(installed.get("url", ""))).scheme == "file":
            is_editable = installed.get("dir_info", {}).get("editable", False)
            source = f"{'-e ' if is_editable else ''}{shlex.quote(unquote(url.path))}"
    except (PackageNotFoundError, ValueError, AttributeError):
        pass
    return f"pip install --force-reinstall --no-deps {source}"
