"""How the library was built, and how its errors are told."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from threefold.errors import UserError
from trainer.ops import native

CUDA_OPS = tuple(native.CUDA_PROTOTYPES)
ROOT = Path(__file__).parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_nvcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cuda_is_built_for_its_targets(tmp_path: Path) -> None:
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, "-DTHREEFOLD_CUDA=ON"], check=True, stdout=subprocess.DEVNULL)
    build = ["cmake", "--build", tmp_path, "--target", "trainer_native", "--parallel", "2"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    [path] = tmp_path.rglob("_native.so")
    plain = ctypes.CDLL(str(path))
    for op in CUDA_OPS:
        assert hasattr(plain, op), f"{op} is exported"
    if shutil.which("cuobjdump"):
        assert set(re.findall(r"sm_\w+", output_of("cuobjdump", "--list-elf", str(path)))) == {"sm_80", "sm_90"}
        assert set(re.findall(r"sm_\w+", output_of("cuobjdump", "--list-ptx", str(path)))) == {"sm_90"}


def test_a_library_without_cuda_exports_none_of_it() -> None:
    assert native.has_cuda() == hasattr(ctypes.CDLL(native.library()._name), CUDA_OPS[0])


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_needs_the_c_library_alone() -> None:
    needed = re.findall(r"^\s*(\S+?)\.so", output_of("ldd", native.library()._name), re.MULTILINE)
    assert not [name for name in needed if re.search("cudart|stdc|gomp|torch|python", name)], needed


def test_a_refused_call_says_what_it_was_given() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(
        RuntimeError, match=r"op_add_norm_forward on cpu, torch.float32 \[3, 4\]: bad argument \(code -1\)"
    ):
        native.call("add_norm_forward", x, 0, *[x.data_ptr()] * 7, -3, 4, 1e-5)


def test_an_op_that_an_older_library_lacks_is_named() -> None:
    with pytest.raises(UserError, match="has no op_of_tomorrow: it is older than this code") as caught:
        native.call("of_tomorrow", torch.ones(3))
    assert "make native" in str(caught.value)


def test_the_c_functions_check_their_arguments() -> None:
    library = native.library()
    x = torch.ones(8)
    at = x.data_ptr()
    assert library.op_add_norm_forward(9, 0, *[at] * 7, 1, 8, 1e-5, 1) == -1
    assert library.op_add_norm_forward(1, 2, *[at] * 7, 1, 8, 1e-5, 1) == -1
    assert library.op_add_norm_backward(1, 0, *[at] * 8, 1, 0, 1) == -1
    dims = [(ctypes.c_int64 * 1)(*value) for value in ([8], [8], [1])]
    assert library.op_normal(1, at, 0, 1, *dims, 1.0, 1) == -1
    assert library.op_error_text(0) == b"ok"


def test_the_instruction_set_can_be_limited(every_simd: list[int]) -> None:
    for simd in every_simd:
        native.library().op_limit_simd(simd)
        assert native.simd() == ("base", "avx2", "avx512")[simd]
