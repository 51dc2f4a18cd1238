"""Block I/O beside its peers in the same run: a durable write and a cold read of one file, and checksums in memory.

    python benchmarks/ckptkit/blocks.py /data --mib 1024 --repeats 5

Peers: raw O_DIRECT writes and reads of 16 MiB without checksums (`dd`), and the safetensors package with an fsync after
it. Interleaved, medians; ratios are to raw.
"""

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import load_file, save_file

from ckptkit.io.blocks import BlockReader, checksums, write_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    path, peer = arguments.folder / "blocks.bench", arguments.folder / "peer.bench"
    data = np.random.default_rng(0).integers(0, 256, arguments.mib << 20, dtype=np.uint8)
    target = np.zeros_like(data)
    found = checksums(data)
    # dd reads its input from the page cache, so that the disk is what is measured
    source = arguments.folder / "source.bench"
    source.write_bytes(data)

    def dd(read: bool) -> None:
        words = [f"if={path}", "of=/dev/null", "iflag=direct"] if read else [
            f"if={source}", f"of={peer}", "oflag=direct", "conv=fsync"]  # fmt: skip
        subprocess.run(["dd", *words, "bs=16M", "status=none"], check=True)

    def write_safetensors() -> None:
        save_file({"data": data}, peer)
        descriptor = os.open(peer, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def read_blocks() -> None:
        with BlockReader(path, len(data), found) as reader:
            reader.read([(0, len(data), target.ctypes.data)])

    compare(
        "durable write",
        len(data),
        arguments.repeats,
        {
            "raw O_DIRECT": lambda: dd(read=False),
            "blocks": lambda: write_file(path, [(data.ctypes.data, len(data))]),
            "safetensors": write_safetensors,
        },
    )
    save_file({"data": data}, peer)

    def read_safetensors() -> None:
        descriptor = os.open(peer, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        np.copyto(target, load_file(peer)["data"])

    compare(
        "cold read",
        len(data),
        arguments.repeats,
        {"raw O_DIRECT": lambda: dd(read=True), "blocks": read_blocks, "safetensors": read_safetensors},
    )
    granules = [data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)]
    compare(
        "checksums",
        len(data),
        arguments.repeats,
        {"xxhash": lambda: [xxhash.xxh3_64_intdigest(g) for g in granules], "ours": lambda: checksums(data)},
    )
    for file in (path, peer, source):
        file.unlink()


def compare(title: str, num_bytes: int, repeats: int, ways: dict[str, Callable[[], object]]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    base = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{title:<14} {name:<13} {num_bytes / median / 1e9:6.2f} GB/s  {base / median:5.2f}")


if __name__ == "__main__":
    main()
