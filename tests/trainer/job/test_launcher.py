"""`trainer launch` starts ranks as torchrun does; a fault is a line, and its exit code is that of what ended them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import ROOT, Job, call, last_step
from threefold.errors import UserError
from threefold.storage import open_storage
from trainer.job.launcher import parse

HOST = socket.gethostname()
VERBS = ("train", "eval")
ON_TWO = ["--nnodes", 2, "--rdzv-id", "job"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train", "run.toml", "--tp", "2"], ("trainer", True, ["train", "run.toml", "--tp", "2"])),
        (["--nproc-per-node", "2", "--", "eval", "run"], ("trainer", True, ["eval", "run"])),
        (["-m", "trainer", "train", "a"], ("trainer", True, ["train", "a"])),
        (["--no-python", "ckptkit", "reshard"], ("ckptkit", False, ["reshard"])),
        ([__file__, "--nproc-per-node", "7"], (__file__, False, ["--nproc-per-node", "7"])),
    ],
)
def test_a_command_is_a_verb_a_script_a_module_or_a_program(
    words: list[str], command: tuple[str, bool, list[str]]
) -> None:
    found = parse(words, VERBS)
    assert (found.training_script, found.module, found.training_script_args) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "run.toml"], r"trian is neither a verb \(train, eval\) nor a script that is there"),
        (["--nproc-per-node", "2"], "the following arguments are required: training_script"),
        (["-m", "--no-python", "train"], "--module and --no-python: a command is one of them"),
        (["--max-restarts", "some", "train"], "argument --max-restarts/--max_restarts: invalid int value: 'some'"),
    ],
)
def test_what_torchrun_would_refuse_is_one_error(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        parse(words, VERBS)
    assert str(raised.value.hint).startswith("trainer launch --nproc-per-node 2 train CONFIG.toml")


def test_no_hint_starts_our_verbs_by_another_launcher() -> None:
    files = [*ROOT.glob("trainer/**/*.py"), *ROOT.glob("threefold/**/*.py"), *ROOT.glob("examples/*.toml")]
    assert len(files) > 100
    assert [file.name for file in files if re.search("torchrun --.*-m trainer ", file.read_text())] == []


def test_no_printed_command_starts_our_verbs_by_another_launcher() -> None:
    """One sentence of README and the guide of signals name `torchrun`, which works too."""
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.sbatch")]
    assert len(files) > 40
    typed = re.compile(r"^(?:srun )? *torchrun (?:[^\n]|\\\n)*(?:-m trainer|--no-python ckptkit) ", re.MULTILINE)
    assert [file.name for file in files if typed.search(file.read_text())] == ["save.md"]


def test_flags_of_torchrun_are_no_flags_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("launch", "--nnodes", "0", "--nproc-per-node=2", "-m", "trainer") == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "error: --nnodes 0: it takes a number above 0, or MIN:MAX"
    assert hint.startswith("hint: trainer launch --nproc-per-node 2")


def launched(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "launch", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip


def outcome(*arguments: object) -> tuple[int, list[str]]:
    process = launched(*arguments)
    out, err = process.communicate(timeout=200)
    assert not out
    return process.returncode, err.splitlines()


def endpoint(port: int) -> Sequence[object]:
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]


@pytest.mark.ci
@pytest.mark.slow
def test_launchers_that_do_not_meet_say_so_in_two_lines(job_config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, (error, hint) = outcome(*ON_TWO, *endpoint(port), "--rdzv-conf", "join_timeout=1", "train", job_config)
    assert code == 3
    assert re.fullmatch(rf"error: the launcher on {HOST}: not all of the 2 nodes came to 127.0.0.1:{port} .*", error)
    assert hint.startswith("hint: the same command on the others")


@pytest.mark.ci
@pytest.mark.slow
def test_a_configuration_error_of_all_ranks_is_said_once(job_config: Path) -> None:
    code, lines = outcome("--nproc-per-node", 2, "train", job_config, "--dp", 2, "--data.stores", "nowhere")
    assert code in (2, 3)
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], lines


@pytest.mark.ci
@pytest.mark.slow
def test_a_rank_that_raises_is_named_and_its_code_is_that_of_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)\n")
    code, lines = outcome("--nproc-per-node", 2, script)
    assert code == 7
    assert re.fullmatch(rf"error: rank 1 on {HOST} \(local rank 1, pid \d+\) ended with 7", lines[0])
    assert len(lines) == 2


@pytest.mark.ci
@pytest.mark.slow
def test_modules_of_the_current_folder_are_not_taken_for_others(tmp_path: Path) -> None:
    for name in ("types", "random", "torch", "trainer", "queue"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of this folder')")
    command = [Path(sys.executable).with_name("trainer"), "launch", "--nproc-per-node", "2", "train", "gone.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no configuration file gone.toml\n")


class Launch(Job):
    """One command line under our launcher."""

    def __init__(self, num_ranks: int, *arguments: object, metrics: Path) -> None:
        super().__init__(num_ranks, *arguments, metrics=metrics)
        at = self._command.index("-m")
        self._command[at : at + 2] = ["-m", "trainer", "launch"]
        assert self._command[at + 2] == "launch"

    def at_step(self, step: int) -> tuple["subprocess.Popen[str]", dict[int, psutil.Process]]:
        """Start it; the process, and its ranks once a step was logged."""
        process = self.start()
        while last_step(self.metrics) < step and process.poll() is None:
            time.sleep(0.01)
        return process, {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}


def run_of(config: Path, folder: Path, *more: object) -> Launch:
    arguments = [config, "--train-steps", 100000, "--save", folder / "run", *more]
    return Launch(2, *arguments, metrics=folder / "m.jsonl")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_ranks_which_save_and_is_the_exit_code(
    number: signal.Signals, job_config: Path, tmp_path: Path
) -> None:
    job = run_of(job_config, tmp_path)
    process, _ = job.at_step(2)
    process.send_signal(number)
    code, output = job.outcome(process)
    last = last_step(tmp_path / "m.jsonl")
    assert (code, f"stopped by {number.name} after step {last}" in output) == (128 + number, True), output
    assert committed_steps(open_storage(tmp_path / "run")) == [last]
    assert "Traceback" not in output


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_whose_time_is_over_has_its_own_code(job_config: Path, tmp_path: Path) -> None:
    job = run_of(job_config, tmp_path, "--train.max-time-s", 1e-6)
    code, output = job.outcome(job.start())
    assert (code, "stopped by train.max_time_s after step 1" in output) == (124, True), output


@pytest.mark.ci
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_others_end(job_config: Path, tmp_path: Path) -> None:
    job = run_of(job_config, tmp_path)
    process, ranks = job.at_step(2)
    ranks[1].kill()
    code, output = job.outcome(process)
    assert code == 137, output
    assert f"error: rank 1 on {HOST} (local rank 1, pid {ranks[1].pid}) was ended by SIGKILL\nhint: dmesg" in output
    assert "Traceback" not in output
