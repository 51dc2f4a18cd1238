"""Planning on object storage: seconds and requests until the first token, and of a rerun on a complete store.

10,000 small objects are on a local S3 server, behind a proxy that passes on what it sends 20 ms later. The time is that
of `datakit preprocess` from its start to the line that says what tokenizes: once with objects grouped, once with items
so small that each object is cut in two, for which a line end is looked for in each. The raw limit is the listing by a
bare client.

    PYTHONPATH=. python benchmarks/datakit/planning.py
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.datakit.preprocess import datakit
from benchmarks.record import Record, add_option
from tools.fault_proxy import Fault, FaultProxy
from tools.s3_server import Server, start, stop

TARGET_S = 60.0
NUM_LINES, NUM_WRITERS, NUM_WORKERS = 8, 32, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    add_option(parser)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="threefold-planning-"))
    try:
        server = start(folder / "server")
        os.environ |= server.environment
        measure(folder, server, arguments.objects, arguments.delay_ms / 1e3, arguments.record)
    finally:
        stop(folder / "server")
        shutil.rmtree(folder)
    return 0


def measure(folder: Path, server: Server, num_objects: int, delay_s: float, record: Record) -> None:
    """Write the objects, make a store of them, and print the table."""
    text = "".join(json.dumps({"text": f"line {number} of a small object"}) + "\n" for number in range(NUM_LINES))
    write_objects(server.bucket, num_objects, text.encode())
    tokenizer, store, url = folder / "tok.json", folder / "store", f"s3://{server.bucket}/corpus"
    datakit("train-tokenizer", f"{url}/00000000.jsonl", "--vocab-size", 300, "--output", tokenizer)
    datakit("preprocess", url, "--output", store, "--tokenizer", tokenizer, "--workers", NUM_WORKERS)
    words = [sys.executable, "-m", "datakit", "preprocess", url, "--tokenizer", str(tokenizer), "--output"]
    with FaultProxy(server.port, Fault("latency", delay_s=delay_s)) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
        print(f"{num_objects:,} objects, {delay_s * 1e3:g} ms a request      seconds  requests")
        listing_s, num_requests = timed(proxy, lambda: list_objects(server.bucket))
        report("listing by a bare client", listing_s, num_requests)
        plans = {"objects grouped": [], "each object cut in two": ["--item-size", str(len(text) * 2 // 3)]}
        for number, (what, flags) in enumerate(plans.items()):
            command = [*words, str(folder / f"unfinished-{number}"), *flags]
            seconds, num_requests = timed(proxy, partial(until_planned, command))
            report(f"plan, {what}", seconds, num_requests, target=True)
            claim, limit = f"a plan of {num_objects:,} objects on S3, {what}", {"listing by a bare client": listing_s}
            record.add(claim, seconds, "s", limit=limit)
        report("complete store, run again", *timed(proxy, partial(until_complete, [*words, str(store)])))


def write_objects(bucket: str, num_objects: int, content: bytes) -> None:
    import obstore

    store = open_bucket(bucket)
    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        keys = (f"corpus/{number:08}.jsonl" for number in range(num_objects))
        list(threads.map(lambda key: obstore.put(store, key, content), keys))


def list_objects(bucket: str) -> None:
    import obstore

    for _ in obstore.list(open_bucket(bucket), "corpus", chunk_size=1000):
        pass


def open_bucket(bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(bucket, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})


def until_planned(words: list[str]) -> None:
    """Run a command until it says what tokenizes."""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "stderr is a pipe"
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("tokenizing with"):
                process.kill()
                return
    raise SystemExit(f"no plan was made: {''.join(lines)}")


def until_complete(words: list[str]) -> None:
    errors = subprocess.run(words, check=True, capture_output=True, text=True).stderr
    assert "is complete already" in errors, errors


def timed(proxy: FaultProxy, work: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of some work, and its requests."""
    started_s, before = time.perf_counter(), proxy.num_faults
    work()
    return time.perf_counter() - started_s, proxy.num_faults - before


def report(what: str, elapsed_s: float, num_requests: int, *, target: bool = False) -> None:
    print(f"{what:<36} {elapsed_s:>9.2f} {num_requests:>9,}" + f"  (target <= {TARGET_S:g})" * target, flush=True)


if __name__ == "__main__":
    sys.exit(main())
