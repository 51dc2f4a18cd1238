"""Run tests with the native libraries under the sanitizers of addresses and of undefined behaviour.

    python -m tools.sanitize                    # the tests that call csrc most, ten minutes on two cores
    python -m tools.sanitize tests/fuzzing      # others

The libraries are built into build/sanitized, by g++. The first read or write outside of an allocation, and the first
overflow of a signed number, ends the tests with its place in csrc.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1"
PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so")  # the last, so that C++ errors of torch stay theirs
OPTIONS = {
    "detect_leaks": 0,  # the interpreter keeps what it has until it ends
    "handle_segv": 0,  # tests of our own handlers send these signals
    "handle_sigbus": 0,
    "alloc_dealloc_mismatch": 0,  # torch's business
    "allocator_may_return_null": 1,  # a MemoryError, as without it
    "quarantine_size_mb": 32,
}
TESTS = (
    *("tests/ops", "tests/ckptkit/io", "tests/ckptkit/format", "tests/fuzzing"),
    *("tests/datakit/batches", "tests/datakit/order", "tests/datakit/rows"),
)

LEFT_OUT = (
    "tests/ops/test_compiled.py",  # compiles C++ of torch's, with the sanitizers around the compiler
    "tests/ops/test_native.py::test_needs_the_c_library_alone",  # these libraries need the sanitizers' too
)


def compiler() -> str | None:
    """Return a g++ that has its sanitizers, if there is one."""
    path = shutil.which("g++")
    return path if path and all(Path(_library(path, name)).is_absolute() for name in PRELOADED) else None


def build(source: Path, folder: Path, *targets: str) -> None:
    """Build the libraries of a source tree with sanitizers, or some of them."""
    path = compiler()
    assert path is not None, "who calls this looked for it"
    words = ["cmake", "-S", str(source), "-B", str(folder), "-DTHREEFOLD_CUDA=OFF", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    subprocess.run(words, check=True, stdout=sys.stderr, env=os.environ | {"CXX": path})
    words = ["cmake", "--build", str(folder), "--parallel", "2", *(["--target", *targets] if targets else [])]
    subprocess.run(words, check=True, stdout=sys.stderr)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables by which a Python that begins has the sanitizers, and the libraries of a folder."""
    path = compiler()
    assert path is not None, "who calls this looked for it"
    return os.environ | {
        "SANITIZED": str(folder),
        "LD_PRELOAD": " ".join(_library(path, name) for name in PRELOADED),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in OPTIONS.items()),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # else many objects are of one allocation
        "OMP_NUM_THREADS": "1",
    }


def pytest_words(folder: Path, *words: str) -> list[str]:
    """Return the command that runs tests with the libraries of a folder, in `environment`."""
    left_out = [f"--deselect={test}" for test in LEFT_OUT]
    return [sys.executable, "-m", "pytest", "-p", "tests.native.sanitized", "-q", "-m", "not slow", *left_out, *words]


def _library(path: str, name: str) -> str:
    """Return where a compiler has a library; its bare name if it has none."""
    return subprocess.run([path, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Build, and run the tests of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="tests; without one those that call csrc most")
    paths = parser.parse_args().paths or TESTS
    if compiler() is None:
        print("error: no g++ has its sanitizers here\nhint: apt install g++", file=sys.stderr)
        return 1
    folder = ROOT / "build" / "sanitized"
    build(ROOT, folder)
    return subprocess.run(pytest_words(folder, *paths), cwd=ROOT, env=environment(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
