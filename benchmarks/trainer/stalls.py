"""Stalls that are planted, and slow runs that are sound: the late rank is named with its place, and no other.

    python benchmarks/trainer/stalls.py [--only dp2] [--record FILE]

Each row is a run of its own under `trainer launch`. In a planted stall one rank stops itself by SIGSTOP in a pass, a
collective, a save or the loader, or is slow in each pass. In a sound run something takes three times as long as a stall
may: by work, by a process that it started, or by a trickle of it. The ranks are processes of this CPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.record import add_option
from threefold.cli import Parser, run

STALL_S, ENDS_WITHIN_S, STEP = 2.0, 120.0, 3
PLANTED = "PLANTED"  # in the environment of ranks: the case
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "send", "receive")
CONFIG = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
ffn_hidden_size = 48
[data]
stores = ["{folder}/train"]
[data.valid]
stores = ["{folder}/train"]
num_samples = 8
[train]
train_steps = {steps}
seq_length = 32
micro_batch_size = 2
global_batch_size = 16
device = "cpu"
[checkpoint]
save = ["{folder}/run"]
save_interval = {step}
[log]
metrics = "{folder}/metrics.jsonl"
[health]
stall_s = {stall_s}
straggler_steps = 4
straggler_share = 1.5
"""


@dataclass(frozen=True, slots=True)
class Case:
    """What is planted: on a rank of a layout, in F, B, a collective, a save, the loader or an evaluation.

    `how` is "stop" or "slow", or of sound runs "work", "child" or "trickle".
    """

    layout: str
    rank: int
    place: str
    how: str = "stop"
    microbatch: int = 1

    def __str__(self) -> str:
        where = f"micro-batch {self.microbatch} of {self.place}" if self.place in ("F", "B") else self.place
        return f"{self.layout}, rank {self.rank}, {where}, {self.how}"

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return 4 if "-" in self.layout else 2

    @property
    def flags(self) -> list[str]:
        """Return the flags of the layout."""
        return [text for axis, size in re.findall(r"([a-z]+)(\d)", self.layout) for text in (f"--{axis}", size)]

    @property
    def stage(self) -> int:
        """Return the pipeline stage of the rank."""
        return {"pp2": self.rank, "tp2-pp2": self.rank // 2}.get(self.layout, 0)


def pairs(layout: str, other: int) -> list[Case]:
    """Return the stalls of a layout of two ranks; a save is planted on one of them."""
    both = [(rank, place) for place in ("F", "collective") for rank in (0, 1)]
    return [Case(layout, *case) for case in [*both, (1, "B"), (other, "save"), (other, "loader"), (0, "B")]]


STALLS = [
    *pairs("tp2", 1),
    *pairs("pp2", 0),
    *pairs("dp2", 1),
    Case("tp2-pp2", 1, "F", microbatch=3),
    Case("tp2-pp2", 2, "collective"),
    Case("tp2-pp2", 3, "save"),
    Case("dp2", 1, "F", "slow"),
    Case("tp2", 0, "B", "slow"),
    Case("dp2", 0, "loader", "slow"),
]
SOUND = [
    Case("dp2", 1, "loader", "trickle"),
    Case("tp2", 0, "loader", "work"),
    Case("pp2", 0, "save", "trickle"),
    Case("dp2", 0, "save", "child"),
    Case("dp2", 1, "F", "child"),
    Case("pp2", 1, "F", "work"),
    Case("tp2", 1, "B", "work"),
    Case("tp2-pp2", 3, "F", "work"),
    Case("dp2", 0, "evaluation", "trickle"),
    Case("pp2", 0, "evaluation", "work"),
]


def main() -> int:
    parser = Parser(prog="stalls.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with this text in their name")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Run all cases and print a row for each; 1 if one is not as it should be."""
    right: dict[str, list[tuple[bool, str]]] = {}
    for cases, kind in ((STALLS, "named"), (SOUND, "left alone")):
        chosen = [case for case in cases if arguments.only in str(case)]
        right[kind] = []
        for case in chosen:
            right[kind].append(outcome(case))
            is_right, text = right[kind][-1]
            print(f"{kind if is_right else 'WRONG':<10}  {case!s:<48}  {text}", flush=True)
        num_right = sum(is_right for is_right, _ in right[kind])
        print(f"{num_right} of {len(chosen)} {kind}", flush=True)
        claim = "planted stalls" if cases is STALLS else "slow but sound runs"
        arguments.record.add(f"{claim} of {len(chosen)} {kind}", num_right, "runs")
    return int(not all(is_right for rows in right.values() for is_right, _ in rows))


def outcome(case: Case) -> tuple[bool, str]:
    """Return whether a run said what it should, and what it said."""
    with tempfile.TemporaryDirectory(prefix="stalls-") as folder:
        return judged(case, reported(case, Path(folder)))


def judged(case: Case, report: str) -> tuple[bool, str]:
    """Return whether a report is right of a case: the rank, its stage and micro-batch, its collective."""
    if case.how not in ("stop", "slow"):
        return report == "done", report
    if case.how == "slow":
        return report == f"rank {case.rank} is slow", report
    expected = {
        "F": f"F of stage {case.stage}, micro-batch {case.microbatch}",
        "B": f"B of stage {case.stage}, micro-batch {case.microbatch}",
        "collective": rf"({'|'.join(COLLECTIVES)}) #\d+ of group \S+, ranks [\d, -]*\b{case.rank}\b",
        "save": "where it saves",
        "loader": "where it reads its batch",
    }[case.place]
    pattern = rf"late: rank {case.rank} \(.*\) is stopped \(by SIGSTOP\): step \d+, .*{expected}"
    return re.match(pattern, report) is not None, report


def reported(case: Case, folder: Path) -> str:
    """Return what a run said of its ranks: a stall's cause, a slow rank, or "done"."""
    from datakit import write_store

    write_store(
        folder / "train", [[number * place % 60 for place in range(90)] for number in range(1, 200)], vocab_size=61
    )
    sizes = {"steps": 6 if case.how != "slow" else 9, "step": STEP, "stall_s": STALL_S}
    (folder / "job.toml").write_text(CONFIG.format(folder=folder, **sizes))
    evaluates = ["--train.eval-interval", str(STEP)] if case.place == "evaluation" else []
    launch = [sys.executable, "-m", "trainer", "launch", "--nproc-per-node", str(case.num_ranks), __file__]
    command = [*launch, "train", str(folder / "job.toml"), *case.flags, *evaluates]
    planted = json.dumps([case.layout, case.rank, case.place, case.how, case.microbatch, str(folder)])
    python_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {PLANTED: planted, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            return awaited(folder, process)
        finally:
            for pid in [int(path.name) for path in folder.glob("ranks/*")]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def awaited(folder: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return the first report of a run, or how it ended."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline_s:
        text = "".join(path.read_text() for path in folder.glob("flight/stall-*.txt"))
        if causes := re.findall(r"late: .*", text):
            return "; ".join(causes)
        if "this report" in text or "hint: " in text:
            return text
        log = (folder / "log").read_text()
        if slow := sorted(set(re.findall(r"rank \d+ is slow", log))):
            return "; ".join(slow)
        if process.poll() is not None:
            return "done" if process.returncode == 0 else log[-2000:]
        time.sleep(0.1)
    return f"nothing within {ENDS_WITHIN_S:g} s"


def plant(layout: str, rank: int, place: str, how: str, microbatch: int, folder: str) -> None:
    """Plant a case into the code of this process, which is a rank of a run; its number is left in a folder."""
    from ckptkit import Checkpointer
    from trainer.data import StepReader
    from trainer.engine import Engine
    from trainer.mesh.processes import Channel
    from trainer.pipeline.executor import Executor

    (Path(folder) / "ranks").mkdir(exist_ok=True)
    (Path(folder) / "ranks" / str(os.getpid())).touch()
    if int(os.environ["RANK"]) != rank:
        return
    here = {"step": 0, "reads": 0}
    always = how == "slow"

    def before(owner: Any, name: str, is_due: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        @wraps(real)
        def planted(*arguments: Any, **options: Any) -> Any:
            if (here["step"] == STEP or always) and is_due(*arguments):
                here["step"] = here["step"] if always else 0
                act(how)
            return real(*arguments, **options)

        setattr(owner, name, planted)

    def counted(owner: Any, name: str, key: str) -> None:
        real = getattr(owner, name)

        def counting(self: Any, *arguments: Any, **options: Any) -> Any:
            here[key] += 1
            return real(self, *arguments, **options)

        setattr(owner, name, counting)

    if place in ("F", "B"):
        is_due = (lambda *_: True) if always else (lambda _self, action, *_rest: action.microbatch == microbatch)
        before(Executor, {"F": "_forward", "B": "_backward"}[place], is_due)
    elif place == "collective":
        for kind in COLLECTIVES:
            before(Channel, kind, lambda *_: True)
    elif place == "save":
        before(Checkpointer, "save", lambda *_: True)
    elif place == "loader":
        before(StepReader, "next_step", lambda *_: True)
    else:
        before(Engine, "eval_batch", lambda *_: True)
    if place == "loader":
        counted(StepReader, "next_step", "step")
    else:
        counted(Engine, "start_step", "step")


def act(how: str) -> None:
    """Stop this process, or take time, by work of a kind."""
    end_s = time.monotonic() + 3 * STALL_S
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "slow":
        time.sleep(0.1)
    elif how == "child":
        subprocess.run([sys.executable, "-c", f"import time\nwhile time.monotonic() < {end_s}: pass"], check=True)
    while how == "work" and time.monotonic() < end_s:
        sum(range(1000))
    while how == "trickle" and time.monotonic() < end_s:
        sum(range(100_000))
        time.sleep(0.1)


if __name__ == "__main__":
    if PLANTED in os.environ:
        from trainer.cli import main as train

        plant(*json.loads(os.environ[PLANTED]))
        raise SystemExit(train(sys.argv[1:]))
    raise SystemExit(main())
