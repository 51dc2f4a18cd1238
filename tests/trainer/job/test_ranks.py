"""Errors of ranks are raised once, with the ranks' numbers, and all ranks end with one exit code."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.trainer.support.training import ROOT, Job, last_step

PROGRAM = """
import sys
from threefold.cli import Parser, run
from threefold.errors import StorageError
from trainer.job.ranks import Ranks

def verb(arguments):
    bad = [int(rank) for rank in sys.argv[1].split(",") if rank]
    with Ranks("cpu", timeout_s=60) as ranks:
        assert ranks.broadcast(ranks.rank * 10 + 5) == 5
        assert ranks.maximum([ranks.rank, -ranks.rank]) == [ranks.world_size - 1, 0]
        def action():
            if ranks.rank in bad:
                raise StorageError("no space left on /data", hint="df -h /data")
            return ranks.rank
        assert ranks.on_all(action) == ranks.rank
        print("done", ranks.rank)

parser = Parser()
parser.add_argument("bad")
parser.set_defaults(handler=verb)
code = run(parser)
print(f"exit {code}", file=sys.stderr)
sys.exit(code)
"""


def test_ranks_exchange_bytes_alone_and_pickle_nothing() -> None:
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "module", None) or ""
            for each in (name, *imported):
                assert not re.search(r"pickle|_object(_list|s)?$", each), f"{path}:{node.lineno} uses {each}"


def launch(tmp_path: Path, num_ranks: int, bad: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), bad]
    if num_ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, *torchrun, str(script), bad]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.ci
@pytest.mark.slow
def test_an_error_of_some_ranks_is_raised_once(tmp_path: Path) -> None:
    done = launch(tmp_path, 3, "1,2")
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("\nerror: ") + done.stderr.startswith("error: ") == 1  # torchrun's report comes besides
    assert "error: on ranks 1, 2 of 3: no space left on /data\nhint: df -h /data\n" in done.stderr
    assert re.search(r"exitcode +: 3 ", done.stderr)
    assert "done" not in done.stdout


@pytest.mark.ci
@pytest.mark.slow
def test_an_error_of_all_ranks_names_none(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "0,1")
    assert done.stderr.count("error: no space left on /data") == 1
    assert "on rank" not in done.stderr.partition("hint: ")[0]


@pytest.mark.ci
@pytest.mark.slow
def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    assert launch(tmp_path, 1, "").stdout == "done 0\n"
    failed = launch(tmp_path, 1, "0")
    assert (failed.returncode, failed.stderr) == (3, "error: no space left on /data\nhint: df -h /data\nexit 3\n")


@pytest.mark.ci
@pytest.mark.slow
def test_a_lost_rank_is_told_in_one_line_each(job_config: Path, tmp_path: Path) -> None:
    job = Job(3, job_config, "--pp", 3, "--train-steps", 100000, metrics=tmp_path / "m.jsonl")
    process = job.start()
    while last_step(job.metrics) < 2 and process.poll() is None:
        time.sleep(0.01)
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
    ranks[1].kill()
    code, output = job.outcome(process)
    assert code == 1
    for rank in (0, 2):
        assert output.count(f"error: on rank {rank} of 3: another rank is gone: ") <= 1
    assert re.search("another rank is gone|SIGTERM: rank 1 of 3 is gone", output), "who hears which first is open"
    assert "in step" not in output, "no traceback of ours"
