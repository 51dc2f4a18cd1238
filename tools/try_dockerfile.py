"""Run the lines of the Dockerfile in a fresh root, on a machine without an engine for containers.

    python -m tools.try_dockerfile          # `make test-dockerfile`: ten minutes, 3 GB under build/ while it runs

The root is Debian of the suite that FROM names, by debootstrap, with its Python in /usr/local. COPY takes what git
tracks. The settings of this machine's pip apply in the root, and its folders of packages are there too.
"""

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.set_up import pip_settings

ROOT = Path(__file__).parents[1]
# Mounts end with the command: they are of its own namespace, whose processes end with it.
ENTER = """mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"
for place in $LENT; do
  if [ -d "$place" ]; then mkdir -p "$0$place"; else mkdir -p "$0${place%/*}"; [ -e "$0$place" ] || : > "$0$place"; fi
  mount --bind "$place" "$0$place"
done
unset LENT; exec chroot "$0" /bin/sh -c 'cd "$0" && exec "$@"' "$@" """


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of a Dockerfile, with the folder and the variables that the lines before it set."""

    word: str
    rest: str
    folder: str = "/"
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


def main(argv: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="ARG=VALUE", help="for ARG lines: TORCH=torch==2.14.1")
    arguments = parser.parse_args(argv)
    if fault := refused():
        sys.exit(f"error: {fault}")
    lines = steps((ROOT / "Dockerfile").read_text(), dict(pair.split("=", 1) for pair in arguments.set))
    settings, lent = lent_settings(pip_settings(Path(sys.executable)))
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dockerfile-", dir=ROOT / "build") as root:
        for step in lines:
            begin = time.perf_counter()
            print("+", step.word, step.rest, flush=True)
            try:
                take(step, Path(root), settings, lent)
            except subprocess.CalledProcessError as error:
                sys.exit(f"error: {step.word} {step.rest} ended with exit code {error.returncode}")
            print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{sum(step.word == 'RUN' for step in lines)} RUN lines passed, and the command of the image")
    return 0


def refused() -> str | None:
    """Return why no root can be made here, None if it can."""
    if os.geteuid() != 0:
        return "a root folder is made by root\nhint: sudo make test-dockerfile"
    missing = [name for name in ("debootstrap", "unshare", "chroot") if not shutil.which(name)]
    return f"{missing[0]} is not installed\nhint: apt-get install debootstrap util-linux" if missing else None


def steps(text: str, settings: dict[str, str]) -> list[Step]:
    """Return the lines that do something, ENTRYPOINT and CMD as one at the end; `settings` are values of ARG lines."""
    folder, variables, lines, command = "/", {}, [], []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "ARG":
            name, _, value = rest.partition("=")
            variables[name] = settings.get(name, value)
        elif word == "ENV":
            variables |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word in ("ENTRYPOINT", "CMD"):
            command += json.loads(rest)
        elif word in ("FROM", "COPY", "RUN", "WORKDIR"):
            folder = rest if word == "WORKDIR" else folder
            lines.append(Step(word, rest, folder, dict(variables)))
        elif word and not word.startswith("#"):
            raise ValueError(f"{word} is not a word that this program knows")
    return [*lines, Step("CMD", shlex.join(command), folder, dict(variables))]


def take(step: Step, root: Path, settings: dict[str, str], lent: list[str]) -> None:
    """Do what a line asks for."""
    inside = root / step.folder.lstrip("/")
    if step.word == "FROM":
        [suite] = re.findall(r"-slim-(\w+)$", step.rest)
        call("debootstrap", "--variant=minbase", "--include=ca-certificates,python3-venv", suite, root)
        enter(root, Step("RUN", "python3 -m venv /usr/local"), settings, [])
    elif step.word == "WORKDIR":
        inside.mkdir(parents=True, exist_ok=True)
    elif step.word == "COPY":
        call("/bin/sh", "-c", 'git ls-files -z | tar -c --null -T - | tar -x -C "$0"', inside)
    else:
        enter(root, step, settings, lent)


def enter(root: Path, step: Step, settings: dict[str, str], lent: list[str]) -> None:
    """Run a line in the root, in namespaces of its own."""
    words = shlex.split(step.rest) if step.word == "CMD" else ["/bin/sh", "-c", step.rest]
    path = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    plain = {"PATH": path, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", "LENT": shlex.join(lent)}
    unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", ENTER)
    call(*unshare, root, step.folder, *words, env={**plain, **settings, **step.variables})


def lent_settings(pip: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return pip's settings as variables, and the files and folders of this machine that they name."""
    kept = {name: value for name, value in pip.items() if "file:" not in value}  # an index of this machine alone
    words = [word for value in kept.values() for word in value.split()]
    lent = [word for word in dict.fromkeys(words) if word.startswith("/") and Path(word).exists()]
    return {"PIP_" + name.upper().replace("-", "_"): value for name, value in kept.items()}, lent


def call(*command: object, env: "dict[str, str] | None" = None) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, env=env, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
