"""Tasks of srun are the ranks of one job."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from threefold.storage import open_storage
from trainer.job.slurm import PORTS, adopt_slurm, first_node, tasks_of_nodes

TASK = {
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[03-05,12]",
    "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_a_task_is_a_rank() -> None:
    environment = dict(TASK)
    adopt_slurm(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["5", "7", "1", "2", "2", "gpu03"]
    assert int(environment["MASTER_PORT"]) in PORTS
    other = TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    adopt_slurm(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # of torchrun
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_PROCID": ""},
    ],
)
def test_all_else_stays(changed: dict[str, str]) -> None:
    environment = TASK | changed
    adopt_slurm(environment)
    assert environment == TASK | changed


def test_what_the_user_set_counts() -> None:
    environment = TASK | {"MASTER_ADDR": "10.0.0.1"}
    adopt_slurm(environment)
    assert environment["MASTER_ADDR"] == "10.0.0.1"


def test_lists_of_slurm() -> None:
    assert tasks_of_nodes("4(x2),3,1(x2)") == [4, 4, 3, 1, 1]
    names = {"a1": "a1", "a1,a2": "a1", "n[001-004]": "n001", "n[7,9]-ib": "n7-ib", "x-[1-2],y3": "x-1", "": ""}
    assert {nodes: first_node(nodes) for nodes in names} == names


@pytest.mark.ci
@pytest.mark.slow
def test_two_tasks_train_one_run(job_config: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trainer", "train", job_config, "--train-steps", 2, "--save", tmp_path / "run"]
    tasks = [
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | {
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
                "SLURM_PROCID": str(rank), "SLURM_NODEID": "0", "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=200)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "= 2 ranks" in said[0]
    assert "done after step 2" not in said[1]
    assert committed_steps(open_storage(tmp_path / "run")) == [2]
