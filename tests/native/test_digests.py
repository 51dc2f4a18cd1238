"""The native libraries compute the same bits on every processor: here, and cross-built for aarch64 under qemu-user."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from threefold.native import library_path

ROOT = Path(__file__).parents[2]
DRIVER, DIGESTS = Path(__file__).with_name("digests.cpp"), Path(__file__).with_name("digests.txt")
KITS = ("datakit", "ckptkit", "trainer")
SYSROOT = Path("/usr/aarch64-linux-gnu")  # Debian's package libc6-arm64-cross
PLATFORM = "aarch64-linux-gnu.2.28"


def run(*command: object, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_this_machine_computes_the_digests(tmp_path: Path) -> None:
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    run(compiler, "-std=c++20", DRIVER, "-o", tmp_path / "digests", "-ldl")
    assert run(tmp_path / "digests", *map(library_path, KITS)) == DIGESTS.read_text()


def test_every_function_of_the_driver_is_in_the_digests() -> None:
    called = {line.split("CALL(")[1].split(")")[0] for line in DRIVER.read_text().splitlines() if "CALL(" in line}
    printed = {line.split()[0].partition(".")[0] for line in DIGESTS.read_text().splitlines()}
    helpers = {"function", "dk_count_pieces", "op_add_norm_partials", "op_rope_partials", "op_sort_rows_partials"}
    assert called - helpers == printed - {"fp64", "fp32", "bf16", "fp16"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_aarch64_computes_the_digests(tmp_path: Path) -> None:
    """Of the libraries in the wheel that the environment names, or that zig builds here as it does for a wheel."""
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("needs zig: pip install ziglang")
    if not shutil.which("qemu-aarch64") or not SYSROOT.is_dir():
        pytest.skip("needs an emulator and its libc: apt install qemu-user libc6-arm64-cross")
    zig = f"{sys.executable} -m ziglang c++ -target {PLATFORM}"
    build = tmp_path / "build"
    if wheel := os.environ.get("WHEEL_AARCH64"):
        zipfile.ZipFile(wheel).extractall(build)
    else:
        run("cmake", "-S", ROOT, "-B", build, "-DTHREEFOLD_CUDA=OFF", CXX=zig)
        run("cmake", "--build", build, "--parallel", "2")
    run(*zig.split(), "-std=c++20", DRIVER, "-o", tmp_path / "digests", "-ldl")
    libraries = [build / kit / "_native.so" for kit in KITS]
    assert run("qemu-aarch64", "-L", SYSROOT, tmp_path / "digests", *libraries) == DIGESTS.read_text()
