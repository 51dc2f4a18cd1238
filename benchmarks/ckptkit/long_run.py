"""What the verbs cost on a run of thousands of steps in object storage: requests, seconds, and a bare client's seconds.

    python benchmarks/ckptkit/long_run.py [--steps 2000] [--delay-ms 20]

An own S3 server (SeaweedFS) gets steps of one small tensor, as keys written directly; a proxy before it passes on
all answers later. Each verb is a process of its own, so its start counts too. The bare client makes as many requests:
the listing of the run, page by page, and GETs for all others, AT_ONCE at once.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from benchmarks.record import Record, add_option
from ckptkit import Box, ParallelLayout, Piece, Placement, Root, TensorInfo, save
from tools.fault_proxy import Fault, FaultProxy
from tools.s3_server import start, stop

AT_ONCE, LISTED_PER_REQUEST = 32, 1000
KEEP = ("--keep-last", "20", "--keep-every", "100")


@dataclass(frozen=True)
class Verb:
    """A verb as typed, and what it may cost: requests, seconds, or for steps that go how many a second at least."""

    arguments: tuple[str, ...]
    max_requests: int = 0
    max_seconds: float = 0.0
    min_steps_a_second: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--delay-ms", type=float, default=20.0, help="by which the proxy holds answers back")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-run-") as name, server(Path(name)) as (port, bucket):
        fill(bucket, Path(name), arguments.steps)
        with FaultProxy(port, Fault("latency", delay_s=arguments.delay_ms / 1000)) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
            measure(proxy, bucket, f"s3://{bucket}/run", arguments.steps, arguments.record)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[int, str]]:
    """Port and bucket of a fresh server, which the environment names."""
    found = start(folder / "s3")
    try:
        os.environ.update(found.environment)
        yield found.port, found.bucket
    finally:
        stop(folder / "s3")


def client(bucket: str) -> S3Store:
    """Return a client of the server that the environment names."""
    options = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "region": "us-east-1"}
    return S3Store(bucket, config=options, client_options={"allow_http": True})


def fill(bucket: str, folder: Path, num_steps: int) -> None:
    """Write steps 1 to num_steps: the files of one that was saved to a local folder, the root with another number."""
    info = TensorInfo("weight", "F32", (256,), Placement("first"))
    piece = Piece.whole(info.name, Box((0,), (256,)), np.zeros(256, np.float32))
    save(
        str(folder / "one"),
        0,
        [piece],
        tensors=[info],
        layout=ParallelLayout(),
        num_layers=1,
        metadata={"tokens": 1, "loss": 2.5, "val_loss": 2.5},
        attempt="a1",
    )
    files = {path.relative_to(folder / "one").as_posix(): path.read_bytes() for path in (folder / "one").rglob("*.*")}
    saved = {name.partition("/")[2]: data for name, data in files.items()}
    root = Root.from_bytes(saved.pop("root.json"), "the saved step")
    store = client(bucket)

    def put(step: int) -> None:
        for name, data in (saved | {"root.json": replace(root, step=step).to_bytes()}).items():
            obstore.put(store, f"run/step-{step:09d}/{name}", data, use_multipart=False)

    started = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(put, range(1, num_steps + 1)))
    num_keys = num_steps * len(files)
    print(f"{num_steps:,} steps of {len(files)} keys written in {time.perf_counter() - started:.1f} s", flush=True)
    print(f"they fit in {-(-num_keys // LISTED_PER_REQUEST)} listings", flush=True)


def measure(proxy: FaultProxy, bucket: str, url: str, num_steps: int, record: Record) -> None:
    """Run each verb once, and the bare client after it."""
    middle = f"{url}/step-{num_steps // 2:09d}"
    verbs = (
        Verb(("inspect", url), max_requests=12),
        Verb(("ls", middle), max_requests=10),
        Verb(("inspect", middle), max_requests=10),
        Verb(("ls", url), max_seconds=4.0),
        Verb(("prune", url, *KEEP, "--dry-run"), max_seconds=5.0),
        Verb(("prune", url, *KEEP), min_steps_a_second=100.0),
    )
    paths = [f"run/step-{step:09d}/root.json" for step in range(num_steps - 19, num_steps + 1)]  # these stay
    for verb in verbs:
        before, started = proxy.num_faults, time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "ckptkit", *verb.arguments], capture_output=True, text=True)
        seconds, num_requests = time.perf_counter() - started, proxy.num_faults - before
        assert done.returncode == 0, done.stderr
        listings, bare_s = bare(bucket, paths, num_requests)
        line = f"{' '.join(verb.arguments):<75} {num_requests:>6,} requests {seconds:7.2f} s   bare {bare_s:6.2f} s"
        num_deleted = sum(text.endswith("  deleted") for text in done.stdout.splitlines())
        print(f"{line} ({listings} of them listings)  {verdict(verb, num_requests, seconds, num_deleted)}", flush=True)
        typed = " ".join(verb.arguments).replace(url, "RUN")
        claim = f"`ckptkit {typed}` of {num_steps:,} steps on S3"
        record.add(claim, seconds, "s", limit={"as many requests of a bare client": bare_s})


def verdict(verb: Verb, num_requests: int, seconds: float, num_deleted: int) -> str:
    """Return what a verb may cost, and whether it does."""
    if verb.max_requests:
        return f"at most {verb.max_requests} requests: {'yes' if num_requests <= verb.max_requests else 'NO'}"
    if verb.max_seconds:
        return f"at most {verb.max_seconds:g} s: {'yes' if seconds <= verb.max_seconds else 'NO'}"
    rate = num_deleted / seconds
    return (
        f"{rate:.0f} steps/s, at least {verb.min_steps_a_second:g}: "
        f"{'yes' if rate >= verb.min_steps_a_second else 'NO'}"
    )


def bare(bucket: str, paths: list[str], num_requests: int) -> tuple[int, float]:
    """Seconds of a client that makes so many requests: at most one listing of all, and GETs; and how many it lists."""
    store, started = client(bucket), time.perf_counter()
    num_keys = 0
    if num_requests > AT_ONCE:
        num_keys = sum(len(chunk) for chunk in obstore.list(store, "run", chunk_size=LISTED_PER_REQUEST))
    listings = -(-num_keys // LISTED_PER_REQUEST)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        gets = (paths[number % len(paths)] for number in range(num_requests - listings))
        list(pool.map(lambda path: obstore.get(store, path).bytes(), gets))
    return listings, time.perf_counter() - started


if __name__ == "__main__":
    main()
