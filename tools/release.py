"""Make a release: the version in every file that has it, a section of the changelog, all checks, sdist and wheel.

    python -m tools.release 0.2.0         # `make release VERSION=0.2.0`

Nothing is committed, tagged or sent anywhere: the last lines are the commands that do so. If a check fails or a signal
ends the release, the files are as they were. The section is made of the fragments in changes/, which are removed.
"""

import argparse
import contextlib
import datetime
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from tools import changelog

ROOT = Path(__file__).parents[1]
PLACES = {  # the one line of each file that has the version
    "pyproject.toml": r'^version = "(.+)"$',
    "threefold/version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
STEPS = (("make", "check"), ("make", "test"), ("make", "wheel"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS_WITHIN_S = 10.0  # a step that was asked to end


def main(argv: "list[str] | None" = None, root: Path = ROOT, steps: tuple[tuple[str, ...], ...] = STEPS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="such as 0.2.0 or 0.2.0rc1")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")
    arguments = parser.parse_args(argv)
    today = datetime.date.today().isoformat()
    if fault := refused(root, arguments.version):
        sys.exit(f"error: {fault}")
    written = changed(root, arguments.version, today)
    used = [path for path in (*changelog.fragments(root), root / changelog.FOLDER / changelog.SUMMARY) if path.exists()]
    if arguments.dry_run:
        print("\n".join(f"would write {name}" for name in written))
        print("\n".join(f"would remove {path.relative_to(root)}" for path in used))
        return 0
    with put_back([*map(root.joinpath, written), *used]):
        for name, text in written.items():
            (root / name).write_text(text)
        for path in used:
            path.unlink()
        for step in steps:
            print("+", *step, flush=True)
            if run(step, root):
                sys.exit(f"error: {' '.join(step)} failed; {', '.join(written)} are as they were")
    version = arguments.version
    print(f"dist/ holds {version}. What is left:\n  git commit -am 'Release {version}' && git tag v{version}")
    return 0


@contextlib.contextmanager
def put_back(paths: list[Path]) -> Iterator[None]:
    """Restore files if the block raises, or one of SIGNALS asks for its end: a second one is ignored meanwhile."""
    before = {path: path.read_text() for path in paths}
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP

    def unwind(number: int, _frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(f"error: {signal.Signals(number).name} ended the release; the files are as they were")

    usual = {number: signal.signal(number, unwind) for number in handled}
    try:
        yield
    except BaseException:
        for path, text in before.items():
            path.write_text(text)
        raise
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def run(step: tuple[str, ...], root: Path) -> int:
    """Return the exit status of a command; end the command too if a signal ends the release.

    A signal waits until the command has started: in the midst of that nobody knows yet what to end.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, usual)
    try:
        with subprocess.Popen(step, cwd=root, preexec_fn=unblock) as process:
            try:
                unblock()
                return process.wait()
            except BaseException:
                process.terminate()  # make hands it on to what it runs
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN_S)
                process.kill()
                raise
    finally:
        unblock()


def refused(root: Path, version: str) -> str | None:
    """Return why a release cannot be made of a tree, None if it can."""
    if not VERSION.fullmatch(version):
        return f"{version} is not a version as 0.2.0 or 0.2.0rc1"
    dirty = git(root, "status", "--porcelain").splitlines()
    if dirty:
        return f"the tree has changes that are not committed: {dirty[0].strip()}\nhint: git stash, or git commit"
    if git(root, "tag", "--list", f"v{version}"):
        return f"v{version} is a tag already"
    found = {name: found_in(root, name) for name in PLACES}
    if len({*found.values()}) != 1:
        return f"files have several versions: {', '.join(f'{name} {each}' for name, each in found.items())}"
    if faults := changelog.faults(root):
        return faults[0]
    if strays := changelog.strays(root):
        return f"CHANGELOG.md has an entry that no fragment has: {strays[0]}\nhint: move it to changes/KIT-WORD.md"
    try:
        changelog.assembled(root, version)
    except ValueError as error:
        return f"nothing to release: {error}"
    return None


def changed(root: Path, version: str, today: str) -> dict[str, str]:
    """Return the new text of each file, of a tree that is not refused."""
    texts = {}
    for name, pattern in PLACES.items():
        text, old = (root / name).read_text(), found_in(root, name)
        line = re.search(pattern, text, re.MULTILINE)
        assert line is not None, f"{name} has a line of the version"
        texts[name] = text.replace(line[0], line[0].replace(str(old), version), 1)
    texts["CHANGELOG.md"] = changelog.assembled(root, f"{version} ({today})")
    return texts


def found_in(root: Path, name: str) -> str | None:
    match = re.search(PLACES[name], (root / name).read_text(), re.MULTILINE)
    return match[1] if match else None


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
