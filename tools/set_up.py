"""Make a virtual environment that holds torch and this project, editable, with one of its extras; `make` calls it.

    python3 tools/set_up.py .venv --extra demo --torch torch==2.13.0

A torch that this Python can import is used as it is; the extras name none, so no installer brings another. Packages are
installed by uv, which pip's own settings reach (indexes, links, certificates), or by pip where uv cannot be had.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = (
    "a C++20 compiler is needed\nhint: apt install g++    # or: dnf install gcc-c++; or name one: CXX=/path/to/c++"
)
# A setting of pip and the variable by which uv knows it. Both separate several values by blanks, uv's links by commas.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}


def main(argv: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", metavar="DIR", type=Path, help="the virtual environment; made where there is none")
    parser.add_argument("--extra", default="demo", help="extra of the project to install")
    parser.add_argument(
        "--torch", default="torch", help="what to install where there is no torch: a version or a wheel"
    )
    parser.add_argument("--cuda", default="auto", help="CUDA ops: auto (where nvcc is), ON or OFF")
    arguments = parser.parse_args(argv)
    if sys.version_info < (3, 11):  # noqa: UP036  # this file runs before anything is installed
        sys.exit(
            f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}\nhint: make PYTHON=python3.13"
        )
    if not any(map(shutil.which, [os.environ.get("CXX", ""), *COMPILERS])):
        sys.exit(f"error: {NO_COMPILER}")
    venv: Path = arguments.venv
    try:
        set_up(venv, arguments.extra, arguments.torch, arguments.cuda)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        sys.exit(f"error: set-up ended with exit code {error.returncode}: {command}\nhint: rm -rf {venv}, and again")
    return 0


def set_up(venv: Path, extra: str, torch: str, cuda: str) -> None:
    """Do all steps, each named before it starts."""
    python = venv / "bin" / "python"
    if not python.exists():
        system = ["--system-site-packages"] if has_torch(sys.executable) else []
        call(sys.executable, "-m", "venv", *system, venv)
    environment = {**uv_settings(pip_settings(python)), **os.environ}
    uv = find_uv(python)
    install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    if not has_torch(python):
        call(*install, torch, env=environment)
    again = ["--reinstall-package", "threefold"] if uv else []  # uv looks at no source but pyproject.toml
    call(
        *install, *again, f"--config-settings=cmake.define.THREEFOLD_CUDA={cuda}", "-e", f".[{extra}]", env=environment
    )


def has_torch(python: "str | Path") -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def find_uv(python: Path) -> "str | Path | None":
    """Return the uv of this machine, or one in the virtual environment; None where it cannot be installed."""
    own = python.with_name("uv")
    for uv in ("uv", own):
        if shutil.which(uv) and subprocess.run([uv, "--version"], capture_output=True, check=False).returncode == 0:
            return uv
    print("+", python, "-m pip install uv", flush=True)
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=False)
    return own if installed.returncode == 0 else None


def pip_settings(python: Path) -> "dict[str, str]":
    """Return what pip's files and variables set for an install; the later of several sections wins, as in pip."""
    shown = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in shown.splitlines():
            if line.startswith(section):
                name, _, value = line[len(section) :].partition("=")
                settings[name] = str(ast.literal_eval(value))
    return settings


def uv_settings(settings: "dict[str, str]") -> "dict[str, str]":
    """Return the same for uv, as variables; all indexes count alike, as they do for pip."""
    found = {UV_NAMES[name]: " ".join(value.split()) for name, value in settings.items() if name in UV_NAMES}
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}


def call(*command: object, env: "dict[str, str] | None" = None) -> None:
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    subprocess.run(words, check=True, env=env)


if __name__ == "__main__":
    sys.exit(main())
