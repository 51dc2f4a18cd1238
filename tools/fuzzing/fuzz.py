"""A parser on made-up bytes, a million times: what it raises besides its own errors, its time and its memory.

Each run is a process of its own, so that a crash of native code ends that alone, and its last input is known. Inputs
that end at a line where none ended before are kept, and are changed further; they are few and small.
"""

import contextlib
import faulthandler
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType

from threefold.errors import UserError
from tools.fuzzing.mutation import Mutation, mutated

MAX_SECONDS, MAX_MEMORY_BYTES, MAX_INPUT_BYTES, MAX_CORPUS = 1.0, 512 << 20, 1 << 16, 300
MAX_FAULTS, KEPT_OF_INPUT = 5, 1 << 16
TOO_LONG, TOO_MUCH = f"more than {MAX_SECONDS:.0f} s", f"more than {MAX_MEMORY_BYTES >> 20} MiB"
HEAD_BYTES = 8


@dataclass(frozen=True)
class Parser:
    """What reads untrusted bytes: sound inputs, how they are read and changed, and how their checksum is made right.

    `reseal` is applied to half of the inputs, so that what follows the checksum is reached. `fresh` names the module
    whose PARSERS has it by its name, if what it calls does not survive a fork: a new Python imports it there.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    parse: Callable[[bytes], object]
    reseal: Callable[[bytes], bytes] | None = None
    mutate: Mutation = mutated
    fresh: str = ""


@dataclass
class Tally:
    """How many inputs were tried and read without a refusal, at how many places they ended, and the faults."""

    num_executions: int = 0
    num_accepted: int = 0
    num_places: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)  # what is wrong, and the input as hex


class Hang(BaseException):
    """A parser took more than its time; no `except Exception` of it stops this."""


def fuzz(
    parser: Parser, *, executions: int = 1 << 62, seconds: float = 3600.0, seed: int = 0, corpus: Path | None = None
) -> Tally:
    """Try a parser until one of the limits is reached, in a process of its own; return what came of it.

    What is kept of the inputs is read from the folder `corpus`, and written there.
    """
    if parser.fresh and __name__ != "__main__":
        limits = {"executions": executions, "seconds": seconds, "seed": seed, "corpus": corpus and str(corpus)}
        command = [sys.executable, "-m", "tools.fuzzing.fuzz", parser.fresh, parser.name, json.dumps(limits)]
        return Tally(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    with tempfile.TemporaryDirectory() as scratch:
        last, report = Path(scratch, "last"), Path(scratch, "report")
        child = os.fork()
        if not child:
            code = 1
            faulthandler.disable()  # a crash is reported by who waits
            try:
                tally = _tried(parser, executions, seconds, seed, corpus, last)
                report.write_text(json.dumps(vars(tally)))
                code = 0
            except BaseException:  # the process ends here, whatever it is
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if report.exists():
            return Tally(**json.loads(report.read_text()))
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        data = last.read_bytes() if last.exists() else b""
        size = int.from_bytes(data[:HEAD_BYTES], "little")
        return Tally(faults=[(f"the process ended by {how}", data[HEAD_BYTES : HEAD_BYTES + size].hex())])


def _tried(parser: Parser, executions: int, seconds: float, seed: int, corpus: Path | None, last: Path) -> Tally:
    rng, tally, began = random.Random(seed), Tally(), time.monotonic()
    seeds = list(parser.seeds())
    known = [*seeds, *_kept(corpus)]
    with _timed(), last.open("w+b", buffering=0) as noted:
        places = {_place(parser, data, tally) for data in seeds}
        if tally.num_accepted < len(seeds):
            tally.faults.append((f"{len(seeds) - tally.num_accepted} of {len(seeds)} sound inputs are refused", ""))
        _bound_memory()
        places |= {_place(parser, data, tally) for data in known[len(seeds) :]}
        while tally.num_executions < executions and time.monotonic() - began < seconds:
            data = parser.mutate(rng.choice(known), rng, seeds)[:MAX_INPUT_BYTES]
            if parser.reseal is not None and rng.random() < 0.5:
                data = parser.reseal(data)
            os.pwrite(noted.fileno(), len(data).to_bytes(HEAD_BYTES, "little") + data, 0)
            place = _place(parser, data, tally)
            if place not in places:
                places.add(place)
                if len(known) < MAX_CORPUS:
                    known.append(data)
                    _keep(corpus, data)
            if len(tally.faults) >= MAX_FAULTS or place == TOO_LONG:
                break
    tally.num_places, tally.seconds = len(places), time.monotonic() - began
    return tally


def _place(parser: Parser, data: bytes, tally: Tally) -> object:
    """Try one input, note what is wrong, and return where its reading ended."""
    tally.num_executions += 1
    before_bytes = _peak_bytes()
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        parser.parse(data)
    except UserError as refusal:
        place: object = tuple(_lines(refusal))
        if _is_of_memory(refusal):
            _note(tally, TOO_MUCH, data)
    except MemoryError:
        place = _note(tally, TOO_MUCH, data)
    except Hang:
        place = _note(tally, TOO_LONG, data)
    except BaseException as fault:  # also what native code raises in its panic
        place = _note(tally, f"{type(fault).__name__}: {fault} {_lines(fault)[-2:]}", data)
    else:
        place = "read"
        tally.num_accepted += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    peak_bytes = _peak_bytes()
    tally.peak_bytes = max(tally.peak_bytes, peak_bytes - before_bytes)
    if peak_bytes - before_bytes > MAX_MEMORY_BYTES:
        _note(tally, TOO_MUCH, data)
    return place


def _note(tally: Tally, what: str, data: bytes) -> object:
    if what not in (known for known, _ in tally.faults):
        tally.faults.append((what, data[:KEPT_OF_INPUT].hex()))
    return what


def _lines(error: BaseException | None) -> list[tuple[str, int]]:
    """Return the lines at which an error was raised, and those before it that led to it."""
    lines = []
    while error is not None:
        lines += [(Path(code.co_filename).name, line) for code, line in _frames(error)]
        error = error.__cause__ or error.__context__
    return lines


def _frames(error: BaseException) -> Iterator[tuple[object, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        yield frame.f_code, line


def _is_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _bound_memory() -> None:
    """Let nothing map more than the bound beside what is mapped now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    """Raise Hang if a timer of CPU time ends."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _kept(corpus: Path | None) -> list[bytes]:
    if corpus is None or not corpus.is_dir():
        return []
    return [path.read_bytes() for path in sorted(corpus.iterdir())[:MAX_CORPUS]]


def _keep(corpus: Path | None, data: bytes) -> None:
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / f"{len(list(corpus.iterdir())):04}").write_bytes(data)


def _main(module: str, name: str, limits: str) -> None:
    """Try a parser in this process, which imported nothing else, and print what came of it."""
    parser = import_module(module).PARSERS[name]
    settings = json.loads(limits)
    corpus = Path(settings.pop("corpus")) if settings["corpus"] else settings.pop("corpus")
    print(json.dumps(vars(fuzz(parser, corpus=corpus, **settings))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
