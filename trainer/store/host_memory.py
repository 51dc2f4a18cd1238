"""Host memory that a GPU copies from and to by itself: page-locked, near the GPU, of exactly the size asked for.

torch's own rounds each size up to a power of two, and is wherever the thread runs that asks for it. Ranks of a node
share its memory, so all of them look before any of them takes some.
"""

import mmap
import os
import weakref
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from threefold.errors import UserError
from trainer.mesh.group import Group
from trainer.store.numa import on_cores

GIB = 1 << 30
PORTABLE = 1  # page-locked for every device
MEMINFO, GROUP_FILES = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def locked_zeros(size: int, dtype: torch.dtype, *, cores: Collection[int], option: str) -> Tensor:
    """Return page-locked memory of zeros, unlocked with its last view; UserError if the system refuses.

    It is of the NUMA node of some cores, where the system allows a thread to run on these. `option` asks for it.
    """
    if not size:
        return torch.zeros(0, dtype=dtype)
    memory = zeros_near(size * dtype.itemsize, cores)
    address, cuda = memory.ctypes.data, torch.cuda.cudart()
    if code := int(cuda.cudaHostRegister(address, memory.nbytes, PORTABLE)):
        raise UserError(
            f"{option}: the system refuses to page-lock {memory.nbytes / GIB:.2f} GiB: error {code} of CUDA",
            hint=f"raise ulimit -l, or leave {option} out",
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, address)
    return torch.from_numpy(memory).view(dtype)


def zeros_near(num_bytes: int, cores: Collection[int]) -> NDArray[np.uint8]:
    """Return memory of zeros, each page touched first by a thread on one of the cores if it may run there."""
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    with on_cores(cores) as is_near:
        if is_near:
            memory[:: mmap.PAGESIZE] = 0
    return memory


def refuse_without_room(num_bytes: int, world: Group, device: torch.device, *, option: str, hint: str) -> None:
    """Raise UserError on all ranks if those of a node need more host memory than it has; each needs `num_bytes`.

    `option` asks for it, and the `hint` is another way.
    """
    num_ranks, room = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_bytes()
    needed = torch.tensor([num_bytes], dtype=torch.float64, device=device)
    largest = int(world.all_reduce(needed, "max").item())
    lacking = torch.tensor([float(num_ranks * largest - room)], dtype=torch.float64, device=device)
    if float(world.all_reduce(lacking, "max").item()) > 0:
        each = f"{num_ranks} ranks of a node take {largest / GIB:.2f} GiB each" if num_ranks > 1 else "a rank takes it"
        raise UserError(
            f"{option} needs {num_ranks * largest / GIB:.2f} GiB of host memory ({each}), and "
            f"{room / GIB:.2f} GiB are available here",
            hint=hint,
        )


def available_bytes(meminfo: Path = MEMINFO, group: Path = GROUP_FILES) -> int:
    """Return how much memory the system has to hand out, or this container if that is less."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    room = next(int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return room if limit == "max" else min(room, int(limit) - int(used))
    except OSError:  # no container of this kind
        return room
