"""A durable save with checksums to a local disk, beside its peers and the raw limit, in the same run, interleaved.

    python benchmarks/ckptkit/save.py /data --repeats 5

Raw is `dd` of as many bytes from the page cache with O_DIRECT and fsync, in as many streams as ckptkit has threads.
Peers: torch DCP with two threads and fsync of its files, safetensors and torch.save with an fsync after them, `cp` of
a file and its fsync. The state is fp32 master weights and Adam moments on the CPU. Before each way its source is read
once, as a training step reads it: the file for raw and `cp`, the tensors for the others. A pause before that lets a
virtual machine hand the memory that the last way freed back to its host, which else slows whatever comes next.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measuring import add_claim, dd, gpt_state, interleaved, parse_arguments, show, sync, touch
from safetensors.torch import save_file

import ckptkit

STREAMS = 2
PAUSE_S = 5


def main() -> None:
    arguments = parse_arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="save-", dir=arguments.folder) as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, work: Path) -> None:
    source, target = work / "source", work / "target"
    state = gpt_state(hidden=arguments.hidden, num_layers=arguments.layers)
    print(f"{len(state.tensors)} tensors, {state.num_bytes / 1e9:.3f} GB")
    with source.open("wb") as file:
        for piece in state.pieces:
            piece.data.numpy().tofile(file)
    sync(source)

    def before() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        os.sync()  # what the deletion leaves to be written is nobody's save
        time.sleep(PAUSE_S)
        subprocess.run(["cat", source], stdout=subprocess.DEVNULL, check=True)  # into the page cache
        touch(state.by_name.values())

    def save_ckptkit() -> None:
        ckptkit.save(
            str(target), 1, state.pieces, tensors=state.tensors, layout=ckptkit.ParallelLayout(),
            num_layers=state.num_layers, metadata={},
        )  # fmt: skip

    def save_dcp() -> None:
        writer = dcp.FileSystemWriter(target, thread_count=2, sync_files=True)
        dcp.save(dict(state.by_name), storage_writer=writer, no_dist=True)

    def save_safetensors() -> None:
        save_file(state.by_name, target / "state.safetensors")
        sync(target / "state.safetensors")

    def save_torch() -> None:
        torch.save(state.by_name, target / "state.pt")
        sync(target / "state.pt")

    def copy() -> None:
        subprocess.run(["cp", source, target / "copy"], check=True)
        sync(target / "copy")

    ways = {
        f"raw, {STREAMS} streams": lambda: dd(source, target / "raw", state.num_bytes, "oflag=direct", streams=STREAMS),
        "ckptkit": save_ckptkit,
        "DCP, 2 threads": save_dcp,
        "safetensors + fsync": save_safetensors,
        "torch.save + fsync": save_torch,
        "cp + fsync": copy,
    }
    timings = interleaved(ways, arguments.repeats, before)
    show(timings, state.num_bytes)
    add_claim(arguments.record, "a durable save with checksums", "ckptkit", timings, state.num_bytes)
    print(f"ckptkit over DCP: {timings['DCP, 2 threads'].median_s / timings['ckptkit'].median_s:.2f}x")


if __name__ == "__main__":
    main()
