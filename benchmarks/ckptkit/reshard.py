"""Reshard beside its raw limit: `cp` of the same bytes, made durable by `sync -d`, in the same run, interleaved.

    python -m tools.make_checkpoint /data/run --gib 4
    python benchmarks/ckptkit/reshard.py /data/run --repeats 5

The page cache of what is read is dropped before every run of either. Prints medians, ratios and peak RSS.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LEGS = {"tp4-pp8": ("--tp", "4", "--pp", "8"), "tp1": (), "tp8-dp2-pp4": ("--tp", "8", "--pp", "4", "--dp", "2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a local run; its newest step is resharded")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in ("cp", *LEGS)}
    rss_bytes = dict.fromkeys(LEGS, 0)
    num_bytes = 0
    for _ in range(arguments.repeats):
        for name in seconds:
            drop_cache(arguments.run)
            with tempfile.TemporaryDirectory(prefix="reshard-", dir=arguments.run.absolute().parent) as folder:
                work = Path(folder) / "run"
                started = time.perf_counter()
                if name == "cp":
                    subprocess.run(["cp", "-r", arguments.run, work], check=True)
                    subprocess.run(["sync", "-d", *work.rglob("*.safetensors")], check=True)
                else:
                    report, rss = reshard(arguments.run, work, LEGS[name])
                    num_bytes, rss_bytes[name] = report["bytes_written"], max(rss_bytes[name], rss)
                seconds[name].append(time.perf_counter() - started)
    copied = statistics.median(seconds["cp"])
    for name, times in seconds.items():
        median = statistics.median(times)
        memory = f"  peak RSS {rss_bytes[name] >> 20} MiB" if name in rss_bytes else ""
        print(f"{name:<12} {median:6.2f} s  {num_bytes / median / 1e9:5.2f} GB/s  {copied / median:5.2f} of cp{memory}")


def reshard(source: Path, target: Path, axes: tuple[str, ...]) -> tuple[dict, int]:
    command = [sys.executable, "-m", "ckptkit", "reshard", str(source), str(target), *axes, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return json.loads(out), usage.ru_maxrss * 1024


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
