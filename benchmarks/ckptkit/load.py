"""A verified, cold load into existing tensors, beside its peers and the raw limit, in the same run, interleaved.

    python benchmarks/ckptkit/load.py /data --repeats 5

All files are taken out of the page cache before each load. Raw is `dd` with O_DIRECT to nowhere, in as many streams as
ckptkit has threads. Peers: torch DCP into existing tensors, safetensors and torch.load(mmap=True) with a copy into
existing tensors. Only ckptkit checks what it reads.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measuring import dd, drop_caches, files_below, gpt_state, interleaved, parse_arguments, show
from safetensors import safe_open
from safetensors.torch import save_file

import ckptkit

STREAMS = 4


def main() -> None:
    arguments = parse_arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="load-", dir=arguments.folder) as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, work: Path) -> None:
    state = gpt_state(hidden=arguments.hidden, num_layers=arguments.layers)
    print(f"{len(state.tensors)} tensors, {state.num_bytes / 1e9:.3f} GB")
    ckptkit.save(
        str(work / "run"), 1, state.pieces, tensors=state.tensors, layout=ckptkit.ParallelLayout(),
        num_layers=state.num_layers, metadata={},
    )  # fmt: skip
    dcp.save(dict(state.by_name), storage_writer=dcp.FileSystemWriter(work / "dcp", thread_count=2), no_dist=True)
    save_file(state.by_name, work / "state.safetensors")
    torch.save(state.by_name, work / "state.pt")
    expected = {name: data.clone() for name, data in state.by_name.items()}
    data_file = max(files_below(work / "run"), key=lambda path: path.stat().st_size)

    def load_ckptkit() -> None:
        ckptkit.restore(str(work / "run"), 1, state.pieces)

    def load_dcp() -> None:
        dcp.load(dict(state.by_name), storage_reader=dcp.FileSystemReader(work / "dcp"), no_dist=True)

    def load_safetensors() -> None:
        with safe_open(work / "state.safetensors", "pt") as file:
            for name, data in state.by_name.items():
                data.copy_(file.get_tensor(name))

    def load_torch() -> None:
        loaded = torch.load(work / "state.pt", mmap=True)
        for name, data in state.by_name.items():
            data.copy_(loaded[name])

    ways = {
        f"raw, {STREAMS} streams": lambda: dd(
            data_file, Path("/dev/null"), state.num_bytes, "iflag=direct", streams=STREAMS
        ),
        "ckptkit, verified": load_ckptkit,
        "DCP": load_dcp,
        "safetensors": load_safetensors,
        "torch.load mmap": load_torch,
    }
    for name, way in list(ways.items())[1:]:
        for data in state.by_name.values():
            data.zero_()
        way()
        assert all(torch.equal(data, expected[key]) for key, data in state.by_name.items()), f"{name} loads the state"
    del expected
    timings = interleaved(ways, arguments.repeats, lambda: drop_caches(work))
    show(timings, state.num_bytes)
    print(f"ckptkit over DCP: {timings['DCP'].median_s / timings['ckptkit, verified'].median_s:.2f}x")


if __name__ == "__main__":
    main()
