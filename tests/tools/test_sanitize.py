"""The native libraries under the sanitizers of addresses and of undefined behaviour, and planted faults of both."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.test_digests import DIGESTS, DRIVER, KITS
from tools.sanitize import FLAGS, ROOT, TESTS, build, compiler, environment, pytest_words

FILL = "std::fill(loss_mask, loss_mask + length, 1.0f);"
FAULTS = {
    "AddressSanitizer: heap-buffer-overflow": ("std::fill(loss_mask, loss_mask + length + 64, 1.0f);"),
    "runtime error: signed integer overflow": f"{FILL} volatile int most = 2147483647; most = most + 1;",
}
needs_sanitizers = pytest.mark.skipif(compiler() is None, reason="needs g++ with its sanitizers: apt install g++")


@needs_sanitizers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_function_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    path = compiler()
    assert path is not None
    build(ROOT, tmp_path / "build")
    libraries = [tmp_path / "build" / kit / "_native.so" for kit in KITS]
    assert all(b"__asan_report_store" in library.read_bytes() for library in libraries)
    driver = tmp_path / "digests"
    subprocess.run([path, "-std=c++20", *FLAGS.split(), str(DRIVER), "-o", str(driver), "-ldl"], check=True)
    found = subprocess.run([str(driver), *map(str, libraries)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, DIGESTS.read_text()), found.stderr[-2000:]
    words = pytest_words(tmp_path / "build", *TESTS)
    done = subprocess.run(
        words, cwd=ROOT, env=environment(tmp_path / "build"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@needs_sanitizers
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc", source / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", source)
    gather = source / "csrc" / "datakit" / "gather.cpp"
    text = gather.read_text()
    assert text.count(FILL) == 1
    gather.write_text(text.replace(FILL, FAULTS[fault]))
    build(source, tmp_path / "build", "datakit_native")
    words = pytest_words(tmp_path / "build", "tests/datakit/batches/test_gather.py", "-x", "-s")
    done = subprocess.run(
        words, cwd=ROOT, env=environment(tmp_path / "build"), capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert fault in done.stdout + done.stderr
