"""Install a wheel into a clean virtual environment without extras, and with each extra alone; run every verb in each.

    python -m tools.try_extras dist/threefold-*.whl       # what `make wheel` made

A verb works, or ends in one line that says what to install; anything else is shown and ends this program with 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tools.set_up import find_uv, pip_settings, uv_settings

EXTRAS = ("", "train", "s3", "arrow", "tiktoken", "fast", "ray", "plot", "tensorstore")
EXTRAS += ("tensorboard", "wandb", "mlflow", "nvml", "eval")
DRIVER = Path(__file__).with_name("try_verbs.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="a wheel of this project")
    parser.add_argument("--extras", nargs="+", default=EXTRAS, metavar="NAME", help="extras to try; '' is none")
    arguments = parser.parse_args()
    faults = 0
    for extra in arguments.extras:
        with tempfile.TemporaryDirectory(prefix="try-extras-") as folder:
            install(Path(folder), arguments.wheel.resolve(), extra)
            command = [Path(folder) / "bin" / "python", "-P", DRIVER]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        ended = [json.loads(line) for line in done.stdout.splitlines()]
        unsound = [each for each in ended if not each["sound"]]
        works = sum(each["code"] == 0 for each in ended)
        print(f"{extra or 'base':<9} {works} work, {len(ended) - works - len(unsound)} end in one line", flush=True)
        for each in unsound:
            print(f"  FAULT {each['command']}\n{each['said']}")
        faults += len(unsound) + (done.returncode != 0 and not unsound)
    return 1 if faults else 0


def install(folder: Path, wheel: Path, extra: str) -> None:
    """A virtual environment with the wheel, the extra and nothing else."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    environment = {**uv_settings(pip_settings(python)), **os.environ}
    uv = find_uv(python)
    command = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    what = f"threefold[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    subprocess.run([*map(str, command), "--quiet", what], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())
