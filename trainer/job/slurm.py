"""Slurm: the ranks that `srun` starts by itself, one a task, without a launcher.

`srun -n 16 trainer train ...` sets no RANK: each task would take itself for the whole job. What Slurm says is put into
the variables that torchrun sets, unless one of them is there.
"""

import re
from collections.abc import MutableMapping

PORTS = range(20_000, 30_000)  # of rank 0, by the numbers of job and step: jobs that share a node seldom meet
SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE")


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and their like from the variables of a step of srun with several tasks."""
    size = environment.get("SLURM_STEP_NUM_TASKS", "")
    if any(name in environment for name in SET_BY_LAUNCHERS) or not size.isdecimal() or int(size) < 2:
        return
    rank, node = environment.get("SLURM_PROCID", ""), environment.get("SLURM_NODEID", "0")
    if not rank.isdecimal() or not node.isdecimal():
        return
    counts = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", size))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    number = sum(int(environment.get(name, "0") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[int(node)] if int(node) < len(counts) else 1),
        "GROUP_RANK": node,
        "MASTER_ADDR": first_node(nodes) or "localhost",
        "MASTER_PORT": str(PORTS[number % len(PORTS)]),
    }
    for name, value in variables.items():
        environment.setdefault(name, value)


def tasks_of_nodes(text: str) -> list[int]:
    """Return how many tasks each node has: `2(x3),1` is [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def first_node(nodes: str) -> str:
    """Return the first name of a list of nodes: `gpu[03-07,12]` begins with gpu03."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else "".join(part or "" for part in match.groups())
