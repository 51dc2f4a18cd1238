"""What a loss of power leaves of what this project, and peers, have acknowledged: every tree that may be there is read.

    uv pip install --python PEERS torch torch_checkpointing safetensors transformers orbax-checkpoint
    uv pip install --python PEERS lightning mosaicml-streaming litdata
    PYTHONPATH=. python benchmarks/ckptkit/power_loss.py --python PEERS/bin/python [NAME ...]

Each program saves two steps, or writes one store, under strace, and promises each once it is complete by its own page:
power_loss_peers.py has the calls. The trees that a loss of power may leave are drawn at every moment, as for this
project's own tests: nothing kept of what no fsync covers, all of it, and each change alone lost or alone kept. Every
tree is made and read by the same program: a step that was promised must be there, and what loads must be what was
saved. Where a program finds the newest step itself, that one must load. "weakest" and "journal" are the models of
docs/concepts/power-loss.md. Prints a table; names are those of power_loss_peers.py, ckptkit and datakit are this
project's, read by this Python.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.ckptkit.power_loss_peers import PEERS, STEPS, arrays, digest, digest_of_samples, samples
from benchmarks.record import Record, add_option
from threefold.errors import UserError
from tools.power_loss.calls import record
from tools.power_loss.disk import replay, tree_of
from tools.power_loss.states import explore

ROOT = Path(__file__).parents[2]
PROGRAM = ["-c", "from benchmarks.ckptkit.power_loss_peers import run; run()"]
OURS, STORES = ("ckptkit", "datakit"), ("datakit", "mosaicml-streaming", "litdata")
FINDS_NEWEST = ("ckptkit", "transformers", "orbax")
PACKAGES = {"dcp": "torch", "dcp-async": "torch", "orbax": "orbax-checkpoint"}
WAIT_S = 60.0


class Reader:
    """A process that reads what its program wrote, started again if it dies."""

    def __init__(self, python: str, name: str) -> None:
        self._command = [python, *PROGRAM, "read", name]
        self._child = self._start()

    def read(self, folder: Path, step: int) -> tuple[int, str]:
        """Return which step was loaded and its digest; -1 and the error where none was."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([str(folder), step]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            self._child = self._start()
            return -1, f"the process ended with {code}"
        number, text = json.loads(line)
        return number, text

    def close(self) -> None:
        """End the process."""
        self._child.communicate()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@dataclass
class Verdict:
    """How many trees of a program were read, and in how many of them something is wrong; with an example of each."""

    name: str
    model: str
    trees: int = 0
    lost: int = 0
    wrong: int = 0
    newest: int | None = None
    seconds: float = 0.0
    examples: dict[str, str] = field(default_factory=dict)

    def look(self, reader: Reader, right: dict[int, str], folder: Path, promises: Sequence[str]) -> str:
        """Read a tree, and count what is wrong with it; nothing of it ends the exploration."""
        promised = {int(text.split()[1]) for text in promises}
        found = {step: reader.read(folder, step) for step in right}
        loaded = {step: text for step, (number, text) in found.items() if number == step}
        lost = [step for step in promised if loaded.get(step) != right[step]]
        wrong = [step for step, text in loaded.items() if text != right[step]]
        self.trees += 1
        self._count("lost", lost and f"step {lost[0]}: {found[lost[0]][1]}")
        self._count("wrong", wrong and f"step {wrong[0]} loads with values that nobody saved")
        if self.newest is not None:
            number, text = reader.read(folder, 0)
            broken = bool(promised) and (number < max(promised) or right.get(number) != text)
            self._count("newest", broken and text)
        return ""

    def _count(self, what: str, example: Any) -> None:
        if example:
            setattr(self, what, getattr(self, what) + 1)
            self.examples.setdefault(what, str(example))


def explored(name: str, python: str) -> list[Verdict]:
    """Run a program, and read every tree that a loss of power may leave of it, in each model."""
    if name in STORES:
        right = {1: digest_of_samples(iter(samples()))}
    else:
        right = {step: digest(arrays(step)) for step in STEPS}
    memory = Path("/dev/shm")
    verdicts = []
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch, "disk")
        folder.mkdir()
        calls = record([python, *PROGRAM, "write", name, str(folder)], Path(scratch, "calls"), cwd=ROOT)
        recording = replay(calls, folder, {})
        if recording.tree(range(len(recording.changes))) != tree_of(folder):
            raise UserError(f"{name}: a replay of its calls does not end as it did")
        reader = Reader(python, name)
        for model in ("weakest", "journal"):  # each program has one host
            verdict = Verdict(name, model, newest=0 if name in FINDS_NEWEST else None)
            began = time.monotonic()
            explore(recording, model, lambda *tree, of=verdict: of.look(reader, right, *tree), folder)
            verdict.seconds = time.monotonic() - began
            verdicts.append(verdict)
        reader.close()
    return verdicts


def version_of(name: str, python: str) -> str:
    """Return the version of a program, as the Python that has it says."""
    package = "threefold" if name in OURS else PACKAGES.get(name, name)
    if name in OURS:
        return version(package)
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Explore the programs of the command line and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all without one")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the peers")
    add_option(parser)
    arguments = parser.parse_args()
    verdicts = []
    print("| program | version | model | trees | promised and lost | loads wrong | newest does not load | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.names or PEERS:
        python = sys.executable if name in OURS else arguments.python
        for verdict in explored(name, python):
            verdicts.append(verdict)
            newest = "" if verdict.newest is None else f"{verdict.newest:,}"
            row = (name, version_of(name, python), verdict.model, f"{verdict.trees:,}", f"{verdict.lost:,}")
            print("|", " | ".join([*row, f"{verdict.wrong:,}", newest, f"{verdict.seconds:.0f}"]), "|", flush=True)
            for what, example in verdict.examples.items():
                print(f"{name}, {verdict.model}, {what}: {example}", file=sys.stderr)
    add_claims(arguments.record, verdicts)
    return 0


def add_claims(record: Record, verdicts: Sequence[Verdict]) -> None:
    """Record what was lost of this project's programs beside the peers of its kind, in the weakest model."""
    weakest = [verdict for verdict in verdicts if verdict.model == "weakest"]
    for ours, words in (("ckptkit", "steps"), ("datakit", "stores")):
        kind = [verdict for verdict in weakest if (verdict.name in STORES) == (ours in STORES)]
        shares = {verdict.name: 100 * verdict.lost / verdict.trees for verdict in kind}
        if ours in shares:
            claim = f"{words} that were acknowledged and are lost with the power"
            record.add(claim, shares.pop(ours), "% of the states", peer=shares)


if __name__ == "__main__":
    sys.exit(main())
