"""The checks in order, of many ranks in two processes: ranks are threads of one Python, which uses one core.

The second process makes the checks of `BESIDE` with trials of its own, over the same stores. Results come in the order
of the checks from both. It gets its bench on stdin, and writes a line for each result; both are JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from threefold.child_python import python_command, search_path
from threefold.options import Fault, walk
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.run.memory_check import with_values
from trainer.verify.bench import Bench
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.result import Result

MANY = 32  # ranks from which on a second process is worth its start
BESIDE = frozenset(("no wait of the host", "products in eight bits", "schedule, recompute, overlap"))  # about half


def run_checks(bench: Bench, deadline: float, *, many: int = MANY) -> Iterator[Result]:
    """Make the checks, and yield what became of each; none begins behind the deadline, of this host's perf_counter.

    From `many` ranks on, and with a second core, a second process makes some of them.
    """
    if layout_of(bench.config).world_size < many or len(os.sched_getaffinity(0)) == 1:
        yield from (one_check(name, bench, deadline) for name in CHECKS)
        return
    with process_beside(bench, deadline) as process:
        for name in CHECKS:
            yield result_of(process, name) if name in BESIDE else one_check(name, bench, deadline)


def one_check(name: str, bench: Bench, deadline: float) -> Result:
    """Make a check unless time is over."""
    if perf_counter() < deadline:
        return run_check(name, CHECKS[name], bench)
    return Result(name, "not run", text="the time was over")


@contextmanager
def process_beside(bench: Bench, deadline: float) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the process that makes the checks of `BESIDE`, and end it with the block."""
    folder = bench.folder / "beside"
    folder.mkdir()
    known = {"config": asdict(bench.config), "run": asdict(bench.run), "folder": str(folder), "deadline": deadline}
    with subprocess.Popen(
        python_command("trainer.verify.beside"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path())},
    ) as process:
        try:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(json.dumps(known).encode())
            process.stdin.close()
            yield process
        finally:
            process.kill()


def result_of(process: "subprocess.Popen[bytes]", name: str) -> Result:
    """Return the next result of the process beside, which is of this check."""
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline()
    if not line:
        return Result(name, "not run", text=f"the process beside ended with exit code {process.wait()}")
    result: dict[str, Any] = json.loads(line)
    assert result["name"] == name, "both have one order"
    return Result(**result)


def config_of(tables: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration of its tables; a small run has values that nobody may write, such as buckets of 0."""
    faults: list[Fault] = []
    config = walk(Config, tables, faults)
    beyond = [name.split(".", 1) for names, _ in faults for name in names]
    return with_values(config, {f"{table}.{field}": tables[table][field] for table, field in beyond})


def main() -> None:
    """Make the checks of `BESIDE` with the bench on stdin, and write their results to stdout."""
    results, sys.stdout = sys.stdout, sys.stderr  # which has what anything else prints
    known = json.load(sys.stdin)
    bench = Bench.of_stores(config_of(known["config"]), config_of(known["run"]), Path(known["folder"]))
    for name in CHECKS:
        if name in BESIDE:
            print(json.dumps(asdict(one_check(name, bench, known["deadline"]))), file=results, flush=True)


if __name__ == "__main__":
    main()
