"""Which attention backend a run takes: by name, by a fixed rule on the CPU and in deterministic runs, else by timing.

A choice changes bits. So one rank chooses, all others take its name, and a resumed run takes the recorded name.
"""

import warnings

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops.attention.flash import Flash2, Flash3, Flash4
from trainer.ops.attention.reference import Reference
from trainer.ops.attention.sdpa import CpuFlash, CudaFlash, Cudnn, CudnnFlash, Efficient
from trainer.ops.attention.seam import Backend, Mask
from trainer.ops.timing import median_seconds

BACKENDS: tuple[Backend, ...] = (
    CpuFlash(),
    Cudnn(),
    CudaFlash(),
    CudnnFlash(),
    Efficient(),
    Flash2(),
    Flash3(),
    Flash4(),
    Reference(),
)
REPEATING = (  # their bits, in deterministic runs; fastest first, on an H200
    "sdpa-cpu",
    "flash-4",
    "sdpa-cudnn-flash",
    "sdpa-flash",
    "flash-2",
    "sdpa-efficient",
    "reference",
)


def backend_named(name: str) -> Backend:
    """Return a backend; UserError lists the names."""
    by_name = {backend.name: backend for backend in BACKENDS}
    if name not in by_name:
        raise UserError(f"no attention backend is named {name!r}", hint=f"one of {', '.join(by_name)}")
    return by_name[name]


def choose(
    q_TNH: Tensor,
    k_UKH: Tensor,
    mask: Mask,
    *,
    deterministic: bool = False,
    backends: tuple[Backend, ...] = BACKENDS,
) -> str:
    """Return the name of the backend for tensors like these; their values are not read.

    On CUDA forward and backward of each backend that takes them are timed, and the fastest is returned. On the CPU, and
    where `deterministic` is asked for, it is the first of `REPEATING` among them.
    """
    takers = [each for each in backends if each.refusal(q_TNH, k_UKH, mask) is None]
    if deterministic or q_TNH.device.type == "cpu":
        return min((each.name for each in takers if each.name in REPEATING), key=REPEATING.index)
    if len(takers) > 1:
        takers = takers[:-1]  # the reference is slow wherever there is another
    seconds = {each.name: _seconds(each, q_TNH, k_UKH, mask) for each in takers}
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < float("inf") else backends[-1].name


def _seconds(backend: Backend, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> float:
    """Return the median of a forward with its backward; infinity, and a warning, if the kernel fails on this device."""
    q, k, v, dout = (torch.randn_like(x) for x in (q_TNH, k_UKH, k_UKH, q_TNH))

    def both() -> None:
        out, lse = backend.forward(q, k, v, mask)
        backend.backward(dout, (q, k, v, out, lse), mask)  # autograd would import sympy for it, in seconds

    try:
        return median_seconds(both)
    except Exception as error:  # e.g. no plan of cuDNN for this shape, no compiler for a package that needs one
        warnings.warn(f"attention: {backend.name} fails here and is left out: {error}", stacklevel=2)
        return float("inf")
