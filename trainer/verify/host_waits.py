"""Calls for which a host would wait for its GPU, found on a CPU: each is an error while it is refused.

On a CPU these are the operations that return numbers of a tensor, or a tensor whose size they decide; on a GPU each
call for which torch's host waits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.linear import grouped
from trainer.ops.attention.seam import Mask
from trainer.verify.difference import require_equal

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.allclose.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten._linalg_check_errors.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
UNDISPATCHED = ("tolist", "cpu", "numpy", "__array__", "__repr__", "to")  # methods of CPU tensors that call no op
_guard = threading.local()  # `is_on` in a thread that may not wait


class _NoReads(TorchDispatchMode):
    """An error for each operation that reads numbers of a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = func in READS
        if func in INDEXING:
            waits = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if func is aten.repeat_interleave.Tensor:
            waits = (kwargs or {}).get("output_size") is None
        require_equal(not waits, f"{func} makes the host wait")
        return func(*args, **kwargs or {})


@contextmanager
def watching_tensors() -> Iterator[None]:
    """Let methods of tensors that call no operation be errors where waits are refused, in backward passes too.

    A device that is an object is the run's own, which here is the CPU; named by a word it is the host.
    """

    def seen(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **named: Any) -> Any:
            by_word = any(isinstance(each, str) for each in (*args, *named.values()))
            waits = name != "to" or (by_word and not named.get("non_blocking"))
            is_on = getattr(_guard, "is_on", False)
            require_equal(not (waits and is_on), f"{name} makes the host wait")
            return real(self, *args, **named)

        return method

    read_ends, documents = grouped.read_ends, Mask.documents  # of CPUs: kernels of a GPU take both on the device
    with ExitStack() as stack:
        replace_in(stack, grouped, "read_ends", lambda ends: unguarded(partial(read_ends, ends)))
        replace_in(stack, Mask, "documents", lambda self, *sizes: unguarded(partial(documents, self, *sizes)))
        for name in UNDISPATCHED:
            replace_in(stack, torch.Tensor, name, seen(name, getattr(torch.Tensor, name)))
        yield


def replace_in(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give an owner another attribute until the stack is left; what is put back is the very thing that was there."""
    is_own, before = name in vars(owner), vars(owner).get(name)  # of a class a class method is not what it returns
    stack.callback(setattr, owner, name, before) if is_own else stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def unguarded(read: Callable[[], Any]) -> Any:
    """Return what is read without the guard: one place that says why may."""
    was, _guard.is_on = getattr(_guard, "is_on", False), False
    try:
        return read()
    finally:
        _guard.is_on = was


@contextmanager
def no_host_waits(device: str) -> Iterator[None]:
    """Refuse waits of this thread's host for the device."""
    if device == "cpu":
        _guard.is_on = True
        try:
            with _NoReads():
                yield
        finally:
            _guard.is_on = False
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
