"""A verified load into existing tensors, cold or warm, beside its peers and the raw limit, in one run, interleaved.

    python benchmarks/ckptkit/load.py /data --repeats 5 [--warm] [--device cuda] [--peers safetensors InstantTensor]

All files are taken out of the page cache before each load, or with --warm read into it. Raw is `dd` with O_DIRECT to
nowhere, in as many streams as ckptkit has threads; warm, a copy of as many bytes in memory, to the device if that is a
GPU (page-locked). Peers: torch DCP into existing tensors, safetensors and torch.load(mmap=True) with a copy into
existing tensors, and on a GPU InstantTensor where it is installed. Only ckptkit checks what it reads: against checksums
(verified), and against the certificate of the save too (certified, its default).
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measuring import State, add_claim, dd, drop_caches, files_below, gpt_state, interleaved, parse_arguments, show
from safetensors import safe_open
from safetensors.torch import save_file

import ckptkit

STREAMS, READ_BYTES = 4, 16 << 20
OURS, UNCERTIFIED = "ckptkit, certified", "ckptkit, verified"
PEERS = ("DCP", "safetensors", "torch.load mmap", "InstantTensor")


def main() -> None:
    arguments = parse_arguments(
        __doc__,
        warm={"action": "store_true", "help": "have all files in the page cache"},
        device={"default": "cpu", "help": "where the tensors are"},
        peers={"nargs": "+", "choices": PEERS, "default": PEERS, "help": "all that can run here"},
    )
    with tempfile.TemporaryDirectory(prefix="load-", dir=arguments.folder) as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, work: Path) -> None:
    state = gpt_state(hidden=arguments.hidden, num_layers=arguments.layers, device=arguments.device)
    print(f"{len(state.tensors)} tensors, {state.num_bytes / 1e9:.3f} GB")
    ckptkit.save(
        str(work / "run"), 1, state.pieces, tensors=state.tensors, layout=ckptkit.ParallelLayout(),
        num_layers=state.num_layers, metadata={},
    )  # fmt: skip
    ways = {"raw": raw(arguments, work, state), **loads(state, work, arguments.peers)}
    expected = {name: data.clone() for name, data in state.by_name.items()}
    for name, way in list(ways.items())[1:]:
        for data in state.by_name.values():
            data.zero_()
        way()
        assert all(torch.equal(data, expected[key]) for key, data in state.by_name.items()), f"{name} loads the state"
    del expected
    timings = interleaved(ways, arguments.repeats, lambda: (read_all if arguments.warm else drop_caches)(work))
    show(timings, state.num_bytes)
    for name in list(ways)[3:]:
        print(f"ckptkit over {name}: {timings[name].median_s / timings[OURS].median_s:.2f}x")
    source = "the page cache" if arguments.warm else "a disk"
    target = "memory" if arguments.device == "cpu" else "a GPU"
    claim = f"a verified load of {state.num_bytes / 1e9:.1f} GB from {source} to {target}"
    del timings[UNCERTIFIED]
    add_claim(arguments.record, claim, OURS, timings, state.num_bytes)


def loads(state: State, work: Path, peers: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return each way to fill the state from its files below `work`, those of the peers made here."""
    device, named = state.pieces[0].data.device, state.by_name

    def load_ckptkit(*, certify: bool) -> None:
        ckptkit.restore(str(work / "run"), 1, state.pieces, certify=certify)

    def load_dcp() -> None:
        dcp.load(dict(named), storage_reader=dcp.FileSystemReader(work / "dcp"), no_dist=True)

    def load_safetensors() -> None:
        with safe_open(work / "state.safetensors", "pt", device=str(device)) as file:
            for name, data in named.items():
                data.copy_(file.get_tensor(name))

    def load_torch() -> None:
        loaded = torch.load(work / "state.pt", mmap=True, map_location="cpu")
        for name, data in named.items():
            data.copy_(loaded[name])

    def load_instanttensor() -> None:
        import instanttensor

        with instanttensor.safe_open(str(work / "state.safetensors"), framework="pt", device=device.index or 0) as file:
            for name, tensor in file.tensors():
                named[name].copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        OURS: partial(load_ckptkit, certify=True),
        UNCERTIFIED: partial(load_ckptkit, certify=False),
    }
    if "DCP" in peers:
        dcp.save(dict(named), storage_writer=dcp.FileSystemWriter(work / "dcp", thread_count=2), no_dist=True)
        ways["DCP"] = load_dcp
    if {"safetensors", "InstantTensor"} & set(peers):
        save_file(named, work / "state.safetensors")
    if "safetensors" in peers:
        ways["safetensors"] = load_safetensors
    if "torch.load mmap" in peers:
        torch.save(named, work / "state.pt")
        ways["torch.load mmap"] = load_torch
    if "InstantTensor" in peers and device.type == "cuda" and importlib.util.find_spec("instanttensor"):
        ways["InstantTensor"] = load_instanttensor
    return {name: synchronised(way) if device.type == "cuda" else way for name, way in ways.items()}


def raw(arguments: argparse.Namespace, work: Path, state: State) -> Callable[[], object]:
    """Return the raw limit: the disk's reads, or one copy of as many bytes of memory."""
    if not arguments.warm:
        data_file = max(files_below(work / "run"), key=lambda path: path.stat().st_size)
        return lambda: dd(data_file, Path("/dev/null"), state.num_bytes, "iflag=direct", streams=STREAMS)
    is_gpu = arguments.device != "cpu"
    source = torch.zeros(state.num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    target = torch.zeros_like(source, device=arguments.device, pin_memory=False)
    return synchronised(lambda: target.copy_(source)) if is_gpu else lambda: target.copy_(source)


def synchronised(way: Callable[[], object]) -> Callable[[], object]:
    """Return the same, which ends when the GPU is done too."""

    def run() -> None:
        way()
        torch.cuda.synchronize()

    return run


def read_all(folder: Path) -> None:
    """Have all files below a folder in the page cache."""
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass


if __name__ == "__main__":
    main()
