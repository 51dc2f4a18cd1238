"""Errors of ranks are raised once, with the ranks' numbers, and all ranks end with one exit code."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from threefold.cli import Parser, run
from threefold.errors import StorageError
from trainer.ranks import Ranks

def verb(arguments):
    bad = [int(rank) for rank in sys.argv[1].split(",") if rank]
    with Ranks("cpu", timeout_s=60) as ranks:
        assert ranks.broadcast(ranks.rank * 10 + 5) == 5
        assert ranks.maximum([ranks.rank, -ranks.rank]) == [ranks.world_size - 1, 0]
        def action():
            if ranks.rank in bad:
                raise StorageError("no space left on /data", hint="df -h /data")
            return ranks.rank
        assert ranks.together(action) == ranks.rank
        print("done", ranks.rank)

parser = Parser()
parser.add_argument("bad")
parser.set_defaults(handler=verb)
code = run(parser)
print(f"exit {code}", file=sys.stderr)
sys.exit(code)
"""


def launch(tmp_path: Path, num_ranks: int, bad: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), bad]
    if num_ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, *torchrun, str(script), bad]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_an_error_of_some_ranks_is_raised_once(tmp_path: Path) -> None:
    done = launch(tmp_path, 3, "1,2")
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("no space left") == 1
    assert "error: on ranks 1, 2 of 3: no space left on /data\nhint: df -h /data\nexit 3\n" in done.stderr
    assert "done" not in done.stdout


def test_an_error_of_all_ranks_names_none(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, "0,1")
    assert done.stderr.count("error: no space left on /data") == 1


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    assert launch(tmp_path, 1, "").stdout == "done 0\n"
    failed = launch(tmp_path, 1, "0")
    assert (failed.returncode, failed.stderr) == (3, "error: no space left on /data\nhint: df -h /data\nexit 3\n")
