"""Tasks of srun and processes of mpirun are the ranks of one job."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from threefold.errors import UserError
from threefold.storage import open_storage
from trainer.job.starters import PORTS, adopt_start, first_node, tasks_of_nodes

TASK = {
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[03-05,12]",
    "SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_a_task_is_a_rank() -> None:
    environment = dict(TASK)
    adopt_start(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["5", "7", "1", "2", "2", "gpu03"]
    assert int(environment["MASTER_PORT"]) in PORTS
    other = TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    adopt_start(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"},  # torchrun's, in each task
        {"RANK": "3", "WORLD_SIZE": "56"},  # of a launcher with eight ranks a task
        {"RANK": "5", "WORLD_SIZE": "7"},  # the same rank
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_PROCID": ""},
    ],
)
def test_all_else_stays(changed: dict[str, str]) -> None:
    environment = TASK | changed
    adopt_start(environment)
    assert environment == TASK | changed


def test_what_the_user_set_counts() -> None:
    environment = TASK | {"MASTER_ADDR": "10.0.0.1"}
    adopt_start(environment)
    assert environment["MASTER_ADDR"] == "10.0.0.1"


def test_lists_of_slurm() -> None:
    assert tasks_of_nodes("4(x2),3,1(x2)") == [4, 4, 3, 1, 1]
    names = {"a1": "a1", "a1,a2": "a1", "n[001-004]": "n001", "n[7,9]-ib": "n7-ib", "x-[1-2],y3": "x-1", "": ""}
    assert {nodes: first_node(nodes) for nodes in names} == names


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-gpu03-71@1",
    "PMIX_RANK": "5",
}
INTEL = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_a_process_of_mpirun_is_a_rank(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu03\ngpu03\ngpu04\n")
    environment = OPEN_MPI | {"PBS_NODEFILE": str(hosts)}
    adopt_start(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["5", "8", "1", "4", socket.gethostname(), "gpu03"]
    environment = dict(INTEL)
    adopt_start(environment)
    assert [environment[name] for name in names[:4]] == ["1", "2", "1", "2"]
    assert environment["MASTER_ADDR"] == "localhost"
    assert int(environment["MASTER_PORT"]) in PORTS


def test_daemons_that_srun_started_are_no_ranks() -> None:
    """Processes of Open MPI have the variables of the task that their daemon is."""
    daemon = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    environment = OPEN_MPI | daemon | {"SLURM_JOB_NODELIST": "gpu[03-04]"}
    adopt_start(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]) == ("5", "8", "gpu03")


@pytest.mark.parametrize("start", [TASK, OPEN_MPI, INTEL], ids=["srun", "Open MPI", "Intel MPI"])
def test_two_that_disagree_are_refused(start: dict[str, str]) -> None:
    environment = start | {"RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(UserError, match=r"RANK 0 of WORLD_SIZE 1 is set, and .* started this as rank") as caught:
        adopt_start(environment)
    assert caught.value.hint == "unset RANK WORLD_SIZE, before the ranks are started"


def test_hosts_without_a_first_one_are_refused() -> None:
    with pytest.raises(UserError, match="Open MPI started 8 ranks on several hosts, and nothing says where rank 0 is"):
        adopt_start(dict(OPEN_MPI))
    environment = OPEN_MPI | {"MASTER_ADDR": "gpu03"}
    adopt_start(environment)
    assert environment["RANK"] == "5"


def of_srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": str(rank),
    }


def of_open_mpi(rank: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def of_mpich(rank: int) -> dict[str, str]:
    return INTEL | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("start", [of_srun, of_open_mpi, of_mpich])
def test_two_processes_train_one_run(start: Callable[[int], dict[str, str]], job_config: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trainer", "train", job_config, "--train-steps", 2, "--save", tmp_path / "run"]
    tasks = [
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | start(rank) | {"MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=200)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "= 2 ranks" in said[0]
    assert "done after step 2" not in said[1]
    assert committed_steps(open_storage(tmp_path / "run")) == [2]
