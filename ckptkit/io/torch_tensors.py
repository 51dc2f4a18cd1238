"""The one file below ckptkit.torch that names torch, in functions: arrays and tensors as bytes, copies to and fro.

Whether the memory of a piece is its elements, one after the other, is found out here too. bfloat16 has no numpy dtype:
in numpy arrays it travels as uint16, and float8 as uint8.
"""

import contextlib
import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import Bytes
from ckptkit.model.tensor import ITEMSIZE, Piece
from threefold.errors import StorageError, UserError

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device

# dtype names of numpy and torch -> the safetensors dtypes whose elements they can hold
DTYPES = {
    "float64": ("F64",), "float32": ("F32",), "float16": ("F16",), "bfloat16": ("BF16",), "uint16": ("BF16",),
    "int64": ("I64",), "int32": ("I32",), "int16": ("I16",), "int8": ("I8",), "bool": ("BOOL",),
    "uint8": ("U8", "F8_E4M3", "F8_E5M2"), "float8_e4m3fn": ("F8_E4M3",), "float8_e5m2": ("F8_E5M2",),
}  # fmt: skip
# torch's dtypes whose elements are stored as they are, as which; those of others are bytes, with a dim more
STORED = {name: stored[0] for name, stored in DTYPES.items() if name != "uint16"}
NAMES = {stored: name for name, stored in STORED.items()}  # the way back
# kinds of tensors whose elements are not here, and what to pass in their place
WITHOUT_MEMORY = {
    "DTensor": ("a DTensor, of which each rank holds a part", "pass tensor.to_local(), with the box of that part"),
    "FakeTensor": ("a FakeTensor, which has no memory", "make the tensor outside of FakeTensorMode"),
}


def is_tensor(data: Any) -> bool:
    """Whether data is a torch tensor (else it is a numpy array); torch is not imported for that."""
    return hasattr(data, "data_ptr")


@cache
def held_by(dtype: Any) -> tuple[str, ...]:
    """Return the safetensors dtypes whose elements memory of a numpy or torch dtype can hold."""
    return DTYPES.get(str(dtype).removeprefix("torch."), ())


def is_writable(data: Any) -> bool:
    """Whether an array's elements may be changed; those of a tensor always may."""
    return bool(is_tensor(data) or data.flags.writeable)


def no_memory(data: Any) -> tuple[str, str] | None:
    """Return what an array or tensor is whose elements are not in memory as they are, and the way out, else None."""
    if not is_tensor(data):
        return None
    import torch

    kind: Any = type(data)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        other = f"a {kind.__name__}, which wraps other tensors", "pass the torch.Tensor that holds the elements"
        return WITHOUT_MEMORY.get(kind.__name__, other)
    for is_so, what, way in (
        (data.is_nested, "a nested tensor", "pass tensor.unbind(), a tuple of its parts"),
        (data.is_meta, "a meta tensor, which has no memory", 'materialise it first: module.to_empty(device="cpu")'),
        (data.layout != torch.strided, f"a tensor of layout {data.layout}",
         "pass tensor.to_dense(), or its indices and values as two tensors"),
        (data.is_quantized, f"a quantized tensor of {data.dtype}",
         "pass tensor.int_repr(), and its scale and zero point as tensors"),
        (data.is_neg(), "a tensor with the negative bit, the negative of its memory", "pass tensor.resolve_neg()"),
        (data.is_conj(), "a tensor with the conjugate bit", "pass torch.view_as_real(tensor.resolve_conj())"),
        (not (data.is_cpu or data.is_cuda), f"a tensor on device {data.device}", "pass tensor.cpu()"),
    ):  # fmt: skip
        if is_so:
            return what, way
    if data.numel() and not data.data_ptr():
        return "a tensor whose storage was freed", "gather or allocate its elements first"
    return None


def are_in_memory(sources: Sequence[Any]) -> bool:
    """Whether `no_memory` is None for all of many, in one go; RuntimeError for some that it is not."""
    tensors = [data for data in sources if hasattr(data, "data_ptr")]
    if not tensors:
        return True
    import torch

    kinds: set[Any] = set(map(type, tensors))
    return all(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for kind in kinds) and all(
        (data.data_ptr() or not data.numel()) and (data.is_cpu or data.is_cuda) and not data.is_neg()
        for data in tensors
    )


def num_bytes(data: Any) -> int:
    """Bytes of all elements of an array or a tensor."""
    return int(data.numel() * data.element_size() if is_tensor(data) else data.nbytes)


def is_on_host(data: Any) -> bool:
    """Whether the elements lie in host memory, not on a device."""
    return bool(not is_tensor(data) or data.is_cpu)


def are_contiguous(sources: Sequence[Any]) -> bool:
    """Whether the elements of each of many lie one after the other in memory."""
    return all(data.is_contiguous() if hasattr(data, "data_ptr") else data.flags.c_contiguous for data in sources)


def host_addresses(sources: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Where the elements of many lie in host memory, 0 for a tensor on a device (and for one without any element)."""
    addresses = [
        (data.data_ptr() if data.is_cpu else 0) if hasattr(data, "data_ptr") else data.ctypes.data for data in sources
    ]
    return np.array(addresses, np.int64)


def device_addresses(sources: Sequence[Any]) -> npt.NDArray[np.uint64]:
    """Where the elements of tensors lie in the memory of their devices, 0 for what is in host memory."""
    return np.array([0 if is_on_host(data) else data.data_ptr() for data in sources], np.uint64)


def check_memory(pieces: Sequence[Piece], sizes: Sequence[int], dtypes: Sequence[str]) -> None:
    """Raise UserError if a piece's memory is not its elements, of so many bytes and a dtype, one after the other."""
    if are_plain([piece.data for piece in pieces], sizes, dtypes):
        return
    for piece, dtype in zip(pieces, dtypes, strict=True):
        if fault := memory_misfit(piece, dtype):
            raise UserError(f"{piece.name}: {fault}", hint=way_out(piece))


def are_plain(data: Sequence[Any], sizes: Sequence[int], dtypes: Sequence[str]) -> bool:
    """Return whether arrays and tensors are all in memory, of so many bytes and these dtypes, and contiguous."""
    with contextlib.suppress(AttributeError, RuntimeError):  # of what is not an array, or has no memory
        pairs = {(each.dtype, dtype) for each, dtype in zip(data, dtypes, strict=True)}
        is_held = all(dtype in held_by(memory) for memory, dtype in pairs)
        return (
            is_held and are_in_memory(data) and [each.nbytes for each in data] == list(sizes) and are_contiguous(data)
        )
    return False


def memory_misfit(piece: Piece, dtype: str) -> str | None:
    """Return what is wrong with a piece whose memory is not its elements one after the other, None for a sound one."""
    if not hasattr(piece.data, "dtype"):
        return f"{dtype}, and a piece's memory is a {type(piece.data).__name__}, not an array or a tensor"
    if absent := no_memory(piece.data):
        return f"{dtype}, and a piece is {absent[0]}"
    if dtype not in held_by(piece.data.dtype):
        return f"{dtype}, and a piece's memory is {piece.data.dtype}"
    wanted, found = (piece.stop - piece.start) * ITEMSIZE[dtype], num_bytes(piece.data)
    if found != wanted:
        return f"a piece of {wanted} bytes has memory of {found} bytes"
    return None if are_contiguous([piece.data]) else "a piece's memory is not contiguous"


def way_out(piece: Piece) -> str | None:
    """Return what to pass in place of a piece's data that has no memory of its own."""
    absent = no_memory(piece.data)
    return absent and absent[1]


def byte_range(tensor: Any, offset: int, size: int) -> Any:
    """Bytes [offset, offset + size) of a contiguous tensor, as a tensor of uint8 over the same memory."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)[offset : offset + size]


@cache
def _driver() -> Any:
    """Return the CUDA driver's library, which torch has loaded already.

    Its calls keep the interpreter: they only start copies, and threads that let go of it queue to get it back.
    """
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


class Transfer:
    """Copies between CUDA tensors and one piece of host memory, on a side stream a device; idle without CUDA tensors.

    The host memory is page-locked on first use, so that copies run at the full rate and beside other work, and stays
    so until `unlock`. Where the system refuses to lock it, copies are slower and otherwise the same.
    """

    def __init__(self) -> None:
        self._locked: Any = None  # the locked memory as a torch tensor
        self._is_registered = False
        self._streams: dict[Any, Any] = {}

    def follow(self, tensors: Sequence[Any]) -> None:
        """Let copies that are started later begin behind the work that these tensors' current streams have now."""
        if not tensors:
            return
        import torch

        cuda: Any = torch.cuda
        for device in {tensor.device for tensor in tensors}:
            if device not in self._streams:
                self._streams[device] = cuda.Stream(device)
            self._streams[device].wait_stream(cuda.current_stream(device))

    def start(self, memory: Bytes, copies: Sequence[tuple[Any, int, int]], *, follows: bool = False) -> None:
        """Start copies of (tensor, offset in memory, bytes) out of the tensors; `wait` ends them.

        They begin behind the current streams' work, or, where it `follows`, behind that of the last `follow`.
        """
        if not copies:
            return
        import torch

        cuda: Any = torch.cuda
        with cuda.device(copies[0][0].device):  # a thread begins on device 0, which may be another rank's
            host = self.lock(memory)
        if not follows:
            self.follow([tensor for tensor, _, _ in copies])
        for device in {tensor.device for tensor, _, _ in copies}:
            with cuda.stream(self._streams[device]), torch.no_grad():
                for tensor, offset, size in copies:
                    if tensor.device == device:
                        there = tensor.detach().reshape(-1).view(torch.uint8)
                        host[offset : offset + size].copy_(there, non_blocking=True)

    def send(self, memory: Bytes, copies: Sequence[tuple[Any, int, int, int]]) -> None:
        """Start copies of (device, address there, offset in memory, bytes) behind the work of the last `follow`.

        They are the driver's own calls: a copy of torch costs ten times as much of the interpreter, and threads that
        send block after block wait for each other there.
        """
        import torch

        cuda: Any = torch.cuda
        for device, own in groupby(copies, key=lambda copy: copy[0]):
            with cuda.device(device):
                self.lock(memory)
                host, stream = memory.ctypes.data, self._streams[device].cuda_stream
                for _, address, offset, size in own:
                    if code := _driver().cuMemcpyAsync(address, host + offset, size, stream):
                        raise StorageError(f"cannot copy {size} bytes to {device}: error {code} of the CUDA driver")

    def wait(self) -> None:
        """Block until all copies are made."""
        for stream in self._streams.values():
            stream.synchronize()

    def lock(self, memory: Bytes) -> Any:
        """Page-lock host memory, if it is not already; return it as a torch tensor."""
        import torch

        if self._locked is None or self._locked.data_ptr() != memory.ctypes.data or len(self._locked) != len(memory):
            self.unlock()
            cuda: Any = torch.cuda
            self._locked = torch.from_numpy(memory)
            code = cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, PORTABLE)
            self._is_registered = int(code) == 0
        return self._locked

    def unlock(self) -> None:
        """Let go of the host memory, before it is unmapped or freed."""
        if self._is_registered:
            import torch

            cuda: Any = torch.cuda
            cuda.cudart().cudaHostUnregister(self._locked.data_ptr())
        self._locked, self._is_registered = None, False
