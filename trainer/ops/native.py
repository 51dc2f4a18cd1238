"""Calls into the trainer's native library: signatures, error codes to exceptions, and a count of the calls of each op.

ctypes releases the GIL around every call. CPU kernels use at most `torch.get_num_threads()` threads; CUDA kernels are
enqueued on the current stream of the tensor's device.
"""

import ctypes
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from threefold.errors import UserError
from threefold.native import DOUBLE, INT, INT64, POINTER, TEXT, UINT64, Prototypes, bind, load_library, rebuild

DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 4}
_INTEGER_CODES = {torch.int64: 3}  # of the ops in _OF_INTEGERS
MIN_CAPABILITY = (8, 0)  # CMakeLists.txt: the oldest GPU that the kernels are built for
SIMD_NAMES = ("base", "avx2", "avx512")
# csrc/ops/ops.h explains them. Arguments between the dtype and, at the end, threads on the CPU or a stream on CUDA:
_OPS: dict[str, tuple[Any, ...]] = {
    "add_norm_forward": (INT, *[POINTER] * 7, INT64, INT64, DOUBLE),
    "add_norm_backward": (INT, *[POINTER] * 8, INT64, INT64),
    "rope_forward": (POINTER, POINTER, POINTER, INT64),
    "rope_backward": (POINTER,) * 6,
    "cross_entropy_forward": (POINTER, POINTER),
    "cross_entropy_backward": (POINTER, POINTER),
    "adamw": (POINTER, POINTER, INT64, POINTER, POINTER, POINTER),
    "squared_norms": (POINTER, INT64, POINTER, INT64, POINTER, POINTER),
    "activation_forward": (INT, POINTER, POINTER, INT64, INT64),
    "activation_backward": (INT, *[POINTER] * 4, INT64, INT64),
    "sort_rows": (POINTER, INT64, INT64, *[POINTER] * 3),
    "gather_rows": (*[POINTER] * 4, INT64, INT64, INT64),
    "combine_rows": (*[POINTER] * 5, *[INT64] * 4),
    "weighted_swiglu_forward": (*[POINTER] * 4, INT64, INT64),
    "weighted_swiglu_backward": (*[POINTER] * 7, INT64, INT64),
    "dropout": (POINTER, POINTER, INT64, INT64, INT64, POINTER),
    "normal": (POINTER, UINT64, INT, POINTER, POINTER, POINTER, DOUBLE),
}
# of CUDA alone: elsewhere plain torch takes their place
_CUDA_OPS: dict[str, tuple[Any, ...]] = {
    "fp8_cast": (INT, INT, INT, *[POINTER] * 3, INT64, INT64),
    "fp8_maxima": (INT, POINTER, POINTER, INT64, INT64),
    "muon_direction": (POINTER, POINTER, INT64, *[POINTER] * 4),
    "muon_update": (POINTER, POINTER, INT64, *[POINTER] * 3),
}
_OF_INTEGERS = ("sort_rows",)
_SIZES = {"add_norm_partials": INT64, "rope_partials": POINTER, "sort_rows_partials": INT64}  # of scratch memory
PROTOTYPES: Prototypes = {
    "op_error_text": (TEXT, INT),
    "op_has_cuda": (INT,),
    "op_simd": (INT,),
    "op_limit_simd": (None, INT),
    "op_philox": (None, POINTER, POINTER, POINTER),
    **{f"op_{name}": (INT, INT, *arguments, INT) for name, arguments in _OPS.items()},
    **{f"op_{name}": (INT64, of) for name, of in _SIZES.items()},
}
CUDA_PROTOTYPES: Prototypes = {
    **{f"op_{name}_cuda": (INT, INT, *arguments, POINTER) for name, arguments in {**_OPS, **_CUDA_OPS}.items()},
    **{f"op_{name}_cuda": (INT64, of) for name, of in _SIZES.items()},
}

_calls: Counter[str] = Counter()
_HERE = nullcontext()
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of torch built with CUDA


@cache
def library() -> ctypes.CDLL:
    """Return the loaded library with its signatures; UserError says how to build it."""
    native = load_library("trainer")
    return bind(native, {name: of for name, of in {**PROTOTYPES, **CUDA_PROTOTYPES}.items() if hasattr(native, name)})


def has_cuda() -> bool:
    """Return whether the library was built with its CUDA kernels."""
    return bool(library().op_has_cuda())


@cache
def lacks_kernels(device: torch.device) -> str | None:
    """Return why the native ops cannot run on a device, None if they can; plain torch takes their place there."""
    if device.type == "meta":
        return "nothing is computed there"
    if device.type != "cuda":
        return None
    if not has_cuda():
        return "the native library was built without CUDA: nvcc was not on PATH"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= MIN_CAPABILITY else f"they need sm_80 or newer, this is sm_{major}{minor}"


def simd() -> str:
    """Return the instruction set of the CPU kernels: base, avx2 or avx512."""
    return SIMD_NAMES[library().op_simd()]


def csrc_calls() -> dict[str, int]:
    """Return how often each native op was called in this process, by its C name without `op_`; tests assert on it."""
    return dict(_calls)


def call(op: str, tensor: torch.Tensor, *arguments: Any) -> None:
    """Run `op_<op>` on the tensor's device; the tensor's dtype goes first, threads or stream last.

    Raises UserError if the device or dtype is not supported, RuntimeError with CUDA's text if a launch fails.
    """
    code = dtype_code(op, tensor)
    if tensor.device.type == "cpu":
        status = _function(op)(code, *arguments, torch.get_num_threads())
    else:
        function = _function(f"{op}_cuda")
        with _on(tensor):
            status = function(code, *arguments, _stream(tensor))
    if status != 0:
        text = library().op_error_text(status).decode()
        raise RuntimeError(f"op_{op} on {tensor.device}, {tensor.dtype} {list(tensor.shape)}: {text} (code {status})")
    _calls[op] += 1


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None, which C takes as null, for None."""
    return None if tensor is None else tensor.data_ptr()


def partials(op: str, tensor: torch.Tensor, size: Any) -> int:
    """Return how many rows of scratch memory the backward of `op` needs on the tensor's device, by its C function."""
    if tensor.device.type == "cpu":
        return int(_function(f"{op}_partials")(size))
    with _on(tensor):
        return _partials(op, size) if isinstance(size, int) else int(_function(f"{op}_partials_cuda")(size))


@cache
def _partials(op: str, size: int) -> int:
    """Return the same for the GPUs of this process, which are alike."""
    return int(_function(f"{op}_partials_cuda")(size))


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, which it nearly always is: to ask is cheaper than to set it."""
    index = tensor.get_device()
    return _HERE if index == torch.cuda.current_device() else torch.cuda.device(index)


def _stream(tensor: torch.Tensor) -> int:
    """Return the current stream of a tensor's GPU, without the object that torch makes of it where that can be had."""
    if _raw_stream is not None:
        return int(_raw_stream(tensor.get_device()))
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def dtype_code(op: str, tensor: torch.Tensor) -> int:
    """Return the library's code of the tensor's dtype, after checking that it can run on the tensor."""
    device = tensor.device.type
    if device != "cuda" and (device != "cpu" or op in _CUDA_OPS):
        raise UserError(f"{op} runs on {'' if op in _CUDA_OPS else 'cpu and '}cuda, not on {tensor.device}")
    if device == "cuda" and not has_cuda():
        raise UserError(
            f"{op} on {tensor.device}: the native library was built without CUDA",
            hint="put nvcc on PATH and run: pip install -e .",
        )
    codes = _INTEGER_CODES if op in _OF_INTEGERS else DTYPE_CODES
    if tensor.dtype not in codes:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in codes)
        raise UserError(f"{op} takes {', '.join(names)}{' or ' if names else ''}{last}, not {tensor.dtype}")
    return codes[tensor.dtype]


@cache
def _function(name: str) -> Any:
    function = getattr(library(), f"op_{name}", None)
    if function is None:
        raise UserError(f"the trainer's native library has no op_{name}: it is older than this code", hint=rebuild())
    return function
