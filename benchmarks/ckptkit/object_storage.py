"""Save and load of a checkpoint on an S3 server on this machine, beside a plain parallel PUT / GET loop.

    PYTHONPATH=. python benchmarks/ckptkit/object_storage.py [--mib 1024] [--repeats 5] [--files 1] [--shared]
        [--url s3://BUCKET/PREFIX]

Loop and checkpoint use the same client, obstore. The loops have no checksums, plan or files: PUT and GET of as many
objects of 16 MiB, 8 at once, and GET of the checkpoint's own data files in ranges of 16 MiB (a server may serve one
large object more slowly than many small ones), which are let go, or copied into memory that is there, as a load must.
The checkpoint is `--files` data files, saved and loaded through the public API and verified. All alternate; printed are
medians of GB/s, CPU seconds per GiB of the client alone (this process and its writers), and the ratios of neighbours.
Without --url a server is started in a temporary folder, on two thirds of the cores, of which the clients then use none,
as if it were another machine; with --shared both use all. What is written is removed.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import obstore
from obstore.store import S3Store

from benchmarks.record import Record, add_option
from ckptkit import Box, Checkpointer, ParallelLayout, Piece, Placement, TensorInfo, restore
from threefold.storage import Storage, open_storage
from tools.s3_server import start, stop

OBJECT_BYTES, AT_ONCE = 16 << 20, 8
NUM_TENSORS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=1, help="data files of the checkpoint: ranks that save in turn")
    parser.add_argument("--shared", action="store_true", help="let the server and its clients use the same cores")
    parser.add_argument("--url", help="where to write; a server of its own if left out")
    add_option(parser)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(own_server(arguments.shared))
        measure(url, arguments.mib << 20, arguments.repeats, arguments.files, arguments.record)


@contextlib.contextmanager
def own_server(is_shared: bool) -> Iterator[str]:
    """The URL of a prefix on a fresh server, which the environment then names; unless shared, on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    num_clients = max(len(cores) // 3, 1)
    with tempfile.TemporaryDirectory(prefix="object-storage-") as name:
        if not is_shared and len(cores) > 1:
            os.sched_setaffinity(0, cores[num_clients:])
        server = start(Path(name))
        if not is_shared:
            os.sched_setaffinity(0, cores[:num_clients])
        os.environ.update(server.environment)
        try:
            yield f"s3://{server.bucket}/bench"
        finally:
            stop(Path(name))
            os.sched_setaffinity(0, cores)


def measure(url: str, num_bytes: int, repeats: int, num_files: int, record: Record) -> None:
    storage = open_storage(url)
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    loaded = np.zeros_like(data)
    scratch = np.zeros(num_bytes + num_files * OBJECT_BYTES, np.uint8)  # the files' headers too
    saved = Saved(url, data, num_files)
    objects = [Range(f"plain/{at}", 0, min(OBJECT_BYTES, num_bytes - at)) for at in range(0, num_bytes, OBJECT_BYTES)]
    files: list[Range] = []
    works: dict[str, Callable[[int], object]] = {
        "PUT objects": lambda number: put_all(url, objects, data),
        "save": saved.save,
        "GET objects": lambda number: get_all(url, objects),
        "GET the files": lambda number: get_all(url, files),
        "GET the files, copy": lambda number: get_all(url, files, scratch),
        "load": lambda number: saved.load(number, loaded),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    cpus: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):  # the first round warms up
        for name, work in works.items():
            loaded[:] = 0
            files[:] = ranges_of(storage)
            cpu, started = saved.cpu_s(), time.perf_counter()
            work(number)
            seconds = time.perf_counter() - started
            if number:
                rates[name].append(num_bytes / seconds / 1e9)
                cpus[name].append((saved.cpu_s() - cpu) / (num_bytes / 2**30))
        assert np.array_equal(loaded, data), "not what was saved"  # the load comes last
        remove(storage)
    saved.close()
    for name in works:
        print(f"{name}: {statistics.median(rates[name]):.3f} GB/s, {statistics.median(cpus[name]):.2f} CPU-s/GiB")
    pairs = [("save", "PUT objects"), *(("load", name) for name in works if name.startswith("GET"))]
    for ours, plain in pairs:
        ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[plain], strict=True))
        print(f"{ours}: {ratio:.2f} of {plain}")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for ours, plain in (("save", "PUT objects"), ("load", "GET the files, copy")):
        record.add(f"a {ours} of {num_bytes >> 20} MiB, S3", medians[ours], "GB/s", limit={plain: medians[plain]})


class Saved:
    """A state cut into tensors, to be saved by `num_ranks` ranks, one after the other, and loaded by one."""

    def __init__(self, url: str, data: np.ndarray, num_ranks: int) -> None:
        numel = len(data) // NUM_TENSORS
        self._url, self._numel, self._num_ranks = url, numel, num_ranks
        self._tensors = [TensorInfo(f"layers.{n}.weight", "U8", (numel,), Placement(n)) for n in range(NUM_TENSORS)]
        self._data = data
        attempt = f"bench-{time.time_ns()}"
        self._savers = [
            Checkpointer(url, rank=rank, world_size=num_ranks, attempt=attempt) for rank in range(num_ranks)
        ]
        for rank, saver in enumerate(self._savers):
            saver.prepare(self._pieces(data, range(rank, NUM_TENSORS, num_ranks)), self._tensors)

    def save(self, number: int) -> None:
        """Save as step `number`; returns when it is committed."""
        for rank in reversed(range(self._num_ranks)):
            pieces = self._pieces(self._data, range(rank, NUM_TENSORS, self._num_ranks))
            self._savers[rank].save(
                number, pieces, tensors=self._tensors, layout=ParallelLayout(dp=self._num_ranks),
                num_layers=NUM_TENSORS, metadata={},
            )  # fmt: skip
        for saver in self._savers:
            for report in saver.wait():
                assert report.ok, report.error

    def load(self, number: int, target: np.ndarray) -> None:
        """Load step `number` into memory that is there."""
        restore(self._url, number, self._pieces(target, range(NUM_TENSORS)), tensors=self._tensors)

    def cpu_s(self) -> float:
        """CPU seconds of this process and of its writers so far."""
        ticks = 0
        for saver in self._savers:
            fields = Path(f"/proc/{saver.writer_pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the writers."""
        for saver in self._savers:
            saver.close()

    def _pieces(self, data: np.ndarray, tensors: range) -> list[Piece]:
        return [
            Piece.whole(self._tensors[n].name, Box((0,), (self._numel,)), data[n * self._numel : (n + 1) * self._numel])
            for n in tensors
        ]


class Range(NamedTuple):
    """Bytes [start, stop) of an object."""

    key: str
    start: int
    stop: int


def ranges_of(storage: Storage) -> list[Range]:
    """Return the data files of the checkpoint there, in ranges of OBJECT_BYTES."""
    files = [found for found in storage.list() if found.key.endswith(".safetensors")]
    return [
        Range(file.key, at, min(at + OBJECT_BYTES, file.size_bytes))
        for file in files
        for at in range(0, file.size_bytes, OBJECT_BYTES)
    ]


def put_all(url: str, objects: Sequence[Range], data: np.ndarray) -> None:
    """PUT the data as these objects, AT_ONCE at once."""
    store, prefix = client(url)

    def put(target: Range, part: np.ndarray) -> None:
        obstore.put(store, f"{prefix}/{target.key}", part.data, use_multipart=False)

    parts = np.split(data, np.cumsum([each.stop for each in objects])[:-1])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(put, objects, parts))


def get_all(url: str, ranges: Sequence[Range], target: np.ndarray | None = None) -> None:
    """GET ranges, AT_ONCE at once, and copy them to `target`, one behind the other, or let them go."""
    store, prefix = client(url)

    def get(part: Range, at: int) -> int:
        data = obstore.get_range(store, f"{prefix}/{part.key}", start=part.start, end=part.stop)
        if target is not None:
            target[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    ends = list(itertools.accumulate(each.stop - each.start for each in ranges))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert sum(pool.map(get, ranges, [0, *ends[:-1]])) == ends[-1]


def client(url: str) -> tuple[S3Store, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    options = {"endpoint": endpoint, "region": os.environ.get("AWS_REGION", "us-east-1")} if endpoint else {}
    return S3Store(bucket, config=options, client_options={"allow_http": endpoint.startswith("http:")}), prefix


def remove(storage: Storage) -> None:
    storage.delete(storage.list_keys())


if __name__ == "__main__":
    main()
