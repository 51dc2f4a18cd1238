"""From the kill of a rank to the next step: SIGKILL of one rank under a launcher with `--max-restarts`, by part.

    python benchmarks/trainer/recovery.py [--ranks 2] [--rounds 4] [--waits] [--record FILE]
    python benchmarks/trainer/recovery.py --device cuda --model 1b --rounds 1 --folder /dev/shm

One job trains and saves. Once a step is saved a rank gets SIGKILL, another one each round, and the job goes on by
itself. Parts are by the clock of the host: noticed is until the launcher has reaped the rank, ended until no rank of
before is left, started until the new rank 0 is a process. The others are the run's own, of its event "start": imports,
meeting (rendezvous), building (groups, model), loading, opening (data, log, choices of ops) and the first step. On GPUs
NCCL's own lines say how long communicators took; that is within building and the first step. With `--waits` ranks that
lose another wait, as a collective on a GPU does.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.record import add_option
from threefold.cli import Parser, run
from trainer.run.start_times import began_s, now_s

HERE = Path(__file__).resolve().parent
WAITS = "RECOVERY_WAITS"  # in the environment of ranks
WAITS_S, WITHIN_S, EVERY_S = 120.0, 80.0, 0.005
SAVE_EVERY, VOCAB_SIZE = 3, 61
OF_RUN = ("imports", "meeting", "building", "loading", "opening", "first_step")
TINY = """
[model]
num_layers = 4
hidden_size = 64
num_heads = 4
ffn_hidden_size = 128
[train]
seq_length = 64
micro_batch_size = 2
"""


def main() -> int:
    parser = Parser(prog="recovery.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of the job, all of dp")
    parser.add_argument("--rounds", type=int, default=4, help="kills")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the ranks")
    parser.add_argument("--model", default="tiny", help="tiny, or a file of this folder: 1b")
    parser.add_argument("--folder", help="where the run is saved; it needs room for two checkpoints")
    parser.add_argument("--torchrun", action="store_true", help="torchrun in place of trainer launch")
    parser.add_argument("--waits", action="store_true", help="let ranks that lose another wait")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Kill ranks of one job, and print the seconds of each part."""
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=arguments.folder) as name:
        folder = Path(name)
        job = Job(folder, arguments)
        rounds = []
        try:
            for number in range(arguments.rounds):
                rounds.append(job.recovered((arguments.ranks - 1 - number) % arguments.ranks))
                print("  ".join(f"{part} {seconds:.2f}" for part, seconds in rounds[-1].items()), flush=True)
        finally:
            job.end()
    how = f"{arguments.model}, {arguments.ranks} ranks of {arguments.device}{', which wait' * arguments.waits}"
    medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
    print(f"\n{'part':<12} median s of {len(rounds)}: {how}")
    for part, seconds in medians.items():
        print(f"{part:<12} {seconds:>6.2f}")
    left_s = medians["noticed"] + medians["ended"]
    arguments.record.add(f"SIGKILL of a rank to the next step, {how}", medians["in all"], "s")
    arguments.record.add(f"SIGKILL of a rank to the end of the others, {how}", left_s, "s")
    return 0


class Job:
    """A job under a launcher, whose ranks are killed."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        """Start it."""
        self.folder, self.metrics, self.num_ranks = folder, folder / "metrics.jsonl", arguments.ranks
        config = HERE / f"{arguments.model}.toml"
        if arguments.model == "tiny":
            config = folder / "tiny.toml"
            config.write_text(TINY)
        write_data(folder)
        batch = 2 * arguments.ranks
        sizes = ["--global-batch-size", batch, "--micro-batch-size", 2, "--train-steps", 100_000, "--log.interval", 100]
        saves = ["--save", folder / "run", "--save-interval", SAVE_EVERY, "--checkpoint.keep-last", 1]
        flags = [config, "--data.stores", folder / "train", "--train.device", arguments.device, *sizes, *saves]
        launcher = ["-m", "torch.distributed.run"] if arguments.torchrun else ["-m", "trainer", "launch"]
        ranks = ["--standalone", "--nproc-per-node", arguments.ranks, "--max-restarts", arguments.rounds]
        command = [sys.executable, *launcher, *ranks, __file__, "train", *flags, "--metrics", self.metrics]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])}
        environment |= {WAITS: "1"} if arguments.waits else {}
        environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
        with (folder / "log").open("w") as log:
            self.launcher = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def recovered(self, rank: int) -> dict[str, float]:
        """Kill a rank once a step is saved, and return the seconds until the next step, by part."""
        saved = len(self._events("save"))
        self._await(lambda: len(self._events("save")) > saved and self._events("save")[-1]["ok"])
        before, num_starts = self._ranks(), len(self._events("start"))
        killed_s = now_s()
        os.kill(before[rank], signal.SIGKILL)
        self._await(lambda: not exists(before[rank]))
        noticed_s = now_s()
        self._await(lambda: not any(map(exists, before.values())))
        ended_s = now_s()
        self._await(lambda: 0 in self._ranks())
        began = self._ranks()[0]
        started_s = began_s(began)
        self._await(lambda: len(self._events("start")) > num_starts)
        parts = {part: self._events("start")[-1][f"{part}_s"] for part in OF_RUN}
        ours = {"noticed": noticed_s - killed_s, "ended": ended_s - noticed_s, "started": started_s - ended_s}
        nccl = {"NCCL": seconds} if (seconds := nccl_s(self.folder / f"nccl.{began}")) else {}
        return {**ours, **parts, "in all": started_s - killed_s + sum(parts.values()), **nccl}

    def end(self) -> None:
        """Kill what is left of it."""
        pids = [*self._ranks().values(), self.launcher.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    def _events(self, kind: str) -> list[dict[str, Any]]:
        texts = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        lines = [json.loads(text) for text in texts if text.endswith("\n")]
        return [line for line in lines if line.get("event") == kind]

    def _ranks(self) -> dict[int, int]:
        """Return the process of each rank that the launcher has now."""
        ranks = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found = re.search(rb"(?:^|\0)RANK=(\d+)\0", (entry / "environ").read_bytes())
                if parent == self.launcher.pid and found:
                    ranks[int(found[1])] = int(entry.name)
        return ranks

    def _await(self, is_so: Any) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not is_so():
            if time.monotonic() > deadline_s or self.launcher.poll() is not None:
                raise SystemExit((self.folder / "log").read_text()[-4000:])
            time.sleep(EVERY_S)


def write_data(folder: Path) -> None:
    """Write a store of tokens that any model has."""
    from datakit import write_store

    rows = [[number * place % (VOCAB_SIZE - 1) for place in range(5000)] for number in range(1, 200)]
    write_store(folder / "train", rows, vocab_size=VOCAB_SIZE)


def exists(pid: int) -> bool:
    """Return whether a process runs, or ended and nobody asked for its code."""
    return Path(f"/proc/{pid}").exists()


def nccl_s(path: Path) -> float:
    """Return the seconds in which NCCL made the communicators of a process, by its own lines."""
    text = path.read_text() if path.exists() else ""
    return sum(map(float, re.findall(r"Init timings.* total ([\d.]+)", text)))


def wait_when_lost() -> None:
    """Let this process, a rank, wait where it loses another, as it does for a collective on a GPU."""
    from trainer.run.loop import Run

    step = Run.step

    def waiting(self: Run) -> None:
        try:
            step(self)
        except RuntimeError:
            time.sleep(WAITS_S)
            raise

    Run.step = waiting  # type: ignore[method-assign]


if __name__ == "__main__":
    if "RANK" in os.environ:
        from trainer.cli import main as train

        if WAITS in os.environ:
            wait_when_lost()
        raise SystemExit(train(sys.argv[1:]))
    raise SystemExit(main())
