"""Save and load of a checkpoint on an S3 server on this machine, beside a plain parallel PUT / GET loop.

    PYTHONPATH=. python benchmarks/ckptkit/object_storage.py [--mib 1024] [--repeats 5] [--files 1] [--shared]
        [--url s3://BUCKET/PREFIX]

Loop and checkpoint use the same client, obstore: the loop with no checksums, a plan or files, over as many objects of
16 MiB, 8 at once; one GET loop lets go of what it gets, another copies it into memory that is there, as a load must.
The checkpoint is `--files` data files, saved and loaded through the public API and verified. They
alternate; printed are medians of GB/s, the ratios of neighbours, and CPU seconds per GiB of the client alone (this
process and its writers). Without --url a server is started in a temporary folder, on two thirds of the cores, of which
the clients then use none, as if it were another machine; with --shared both use all. What is written is removed.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

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
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = arguments.url or stack.enter_context(own_server(arguments.shared))
        measure(url, arguments.mib << 20, arguments.repeats, arguments.files)


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


def measure(url: str, num_bytes: int, repeats: int, num_files: int) -> None:
    storage = open_storage(url)
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    loaded = np.zeros_like(data)
    saved = Saved(url, data, num_files)
    works: dict[str, Callable[[int], object]] = {
        "plain PUT": lambda number: put_all(url, data),
        "save": saved.save,
        "plain GET": lambda number: get_all(url, len(data)),
        "GET, copy": lambda number: get_all(url, len(data), loaded),
        "load": lambda number: saved.load(number, loaded),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    cpus: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):  # the first round warms up
        for name, work in works.items():
            loaded[:] = 0
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
    for ours, plain in (("save", "plain PUT"), ("load", "plain GET"), ("load", "GET, copy")):
        ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[plain], strict=True))
        print(f"{ours}: {ratio:.2f} of {plain}")


class Saved:
    """A state cut into tensors, to be saved by `num_ranks` ranks, one after the other, and loaded by one."""

    def __init__(self, url: str, data: np.ndarray, num_ranks: int) -> None:
        numel = len(data) // NUM_TENSORS
        self._url, self._numel, self._num_ranks = url, numel, num_ranks
        self._tensors = [TensorInfo(f"layers.{n}.weight", "U8", (numel,), Placement(n)) for n in range(NUM_TENSORS)]
        self._data = data
        self._savers = [
            Checkpointer(url, rank=rank, world_size=num_ranks, attempt=f"bench-{time.time_ns()}")
            for rank in range(num_ranks)
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


def put_all(url: str, data: np.ndarray) -> None:
    """PUT the data as objects of OBJECT_BYTES, AT_ONCE at once."""
    store, prefix = client(url)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(
            lambda at: obstore.put(
                store, f"{prefix}/plain/{at}", data[at : at + OBJECT_BYTES].data, use_multipart=False
            ),
            range(0, len(data), OBJECT_BYTES),
        ):
            pass


def get_all(url: str, num_bytes: int, target: np.ndarray | None = None) -> None:
    """GET those objects, AT_ONCE at once, and copy them to `target` or let them go."""
    store, prefix = client(url)

    def get(at: int) -> int:
        data = obstore.get(store, f"{prefix}/plain/{at}").bytes()
        if target is not None:
            target[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert sum(pool.map(get, range(0, num_bytes, OBJECT_BYTES))) == num_bytes


def client(url: str) -> tuple[S3Store, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    options = {"endpoint": endpoint, "region": os.environ.get("AWS_REGION", "us-east-1")} if endpoint else {}
    return S3Store(bucket, config=options, client_options={"allow_http": endpoint.startswith("http:")}), prefix


def remove(storage: Storage) -> None:
    storage.delete(storage.list_keys())


if __name__ == "__main__":
    main()
