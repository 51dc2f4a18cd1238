"""What starts a process as a rank without a launcher of torch: tasks of `srun`, processes of `mpirun` and its like.

`srun -n 16 trainer train ...` sets no RANK: each task would take itself for the whole job. What the starter says is put
into the variables that torchrun sets. The innermost starter counts: a launcher under `srun`, with more ranks than there
are tasks, and Open MPI's daemons, which are tasks of `srun` themselves.
"""

import re
import socket
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from threefold.errors import UserError

PORTS = range(20_000, 30_000)  # of rank 0, by the job: jobs that share a node seldom meet
SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE")
MPI = {  # rank, ranks, rank on the host, ranks on it: as each program names them
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
}
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID")  # which ranks of a job have in common


@dataclass(frozen=True, slots=True)
class Start:
    """Which rank a process was started as, by what, and where rank 0 is."""

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    address: str
    job: int

    @property
    def variables(self) -> dict[str, str]:
        """Return what torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": self.node,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(PORTS[self.job % len(PORTS)]),
        }


def adopt_start(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and their like from what started several processes, unless a launcher set them.

    Raises UserError if these are of another rank than that says, or no host of rank 0 is known.
    """
    start = next(starts(environment), None)
    if start is None or "TORCHELASTIC_RUN_ID" in environment:
        return
    if any(name in environment for name in SET_BY_LAUNCHERS):
        check_agreement(environment, start)
        return
    if not environment.get("MASTER_ADDR", start.address):
        text = f"{start.by} started {start.size} ranks on several hosts, and nothing says where rank 0 is"
        raise UserError(text, hint="MASTER_ADDR=HOST in their environment: mpirun -x MASTER_ADDR=HOST, or -genv")
    for name, value in start.variables.items():
        environment.setdefault(name, value)


def check_agreement(environment: Mapping[str, str], start: Start) -> None:
    """Raise UserError if RANK and WORLD_SIZE, which no launcher with more ranks has set, are others than a start's."""
    rank, size = (environment.get(name, "") for name in SET_BY_LAUNCHERS)
    if not rank.isdecimal() or not size.isdecimal() or int(size) > start.size:
        return
    if (int(rank), int(size)) != (start.rank, start.size):
        text = f"RANK {rank} of WORLD_SIZE {size} is set, and {start.by} started this as rank {start.rank} "
        raise UserError(f"{text}of {start.size}", hint="unset RANK WORLD_SIZE, before the ranks are started")


def starts(environment: Mapping[str, str]) -> Iterator[Start]:
    """Yield what started this process as one of several, the innermost first."""
    for by, names in MPI.items():
        if (start := _of_mpi(environment, by, names)) is not None:
            yield start
    if (start := _of_slurm(environment)) is not None:
        yield start


def _of_mpi(environment: Mapping[str, str], by: str, names: tuple[str, str, str, str]) -> Start | None:
    numbers = [environment.get(name, "") for name in names]
    if not all(number.isdecimal() for number in numbers[:2]) or int(numbers[1]) < 2:
        return None
    rank, size = int(numbers[0]), int(numbers[1])
    local_rank, local_size = map(int, numbers[2:]) if all(map(str.isdecimal, numbers[2:])) else (rank, size)
    job = next((environment[name] for name in JOBS if environment.get(name)), "")
    address = "localhost" if local_size == size else _first_host(environment)
    return Start(by, rank, size, local_rank, local_size, socket.gethostname(), address, zlib.crc32(job.encode()))


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first host of a batch system's job, empty if it names none."""
    listed = environment.get("PBS_NODEFILE", "")
    if listed and Path(listed).is_file():
        return Path(listed).read_text(encoding="utf-8").split()[0]
    return first_node(environment.get("SLURM_JOB_NODELIST", ""))


def _of_slurm(environment: Mapping[str, str]) -> Start | None:
    size, rank = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_PROCID", "")
    node = environment.get("SLURM_NODEID", "0")
    if not all(number.isdecimal() for number in (size, rank, node)) or int(size) < 2:
        return None
    counts = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", size))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = sum(int(environment.get(name, "0") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    local_size = counts[int(node)] if int(node) < len(counts) else 1
    local_rank = int(environment.get("SLURM_LOCALID", "0"))
    return Start("srun", int(rank), int(size), local_rank, local_size, node, first_node(nodes) or "localhost", job)


def tasks_of_nodes(text: str) -> list[int]:
    """Return how many tasks each node has: `2(x3),1` is [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes: `gpu[03-07,12]` begins with gpu03."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else "".join(part or "" for part in match.groups())
