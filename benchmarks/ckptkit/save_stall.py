"""How long a save stops training, as a multiple of the raw copy of the same bytes in the same run.

    python benchmarks/ckptkit/save_stall.py [--gib 1] [--device cpu|cuda] [--saves 6] [--prepare] [--url DIR]

Raw is one thread's memcpy into touched memory (cpu) or the copy into page-locked memory (cuda). Prints one line a save
and the medians; the first save stands apart, since without --prepare it grows and touches the arena.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from ckptkit import Box, Checkpointer, ParallelLayout, Piece, Placement, TensorInfo

NUM_TENSORS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--prepare", action="store_true", help="touch the arena before the first save")
    parser.add_argument("--url", help="run URL to save to; a temporary folder if left out")
    arguments = parser.parse_args()
    folder = None if arguments.url else tempfile.mkdtemp(prefix="save-stall-")
    numel = int(arguments.gib * 2**30) // 4 // NUM_TENSORS
    state = [torch.rand(numel, device=arguments.device) for _ in range(NUM_TENSORS)]
    tensors = [TensorInfo(f"layers.{n}.weight", "F32", (numel,), Placement(n)) for n in range(NUM_TENSORS)]
    pieces = [Piece.whole(t.name, Box((0,), (numel,)), data) for t, data in zip(tensors, state, strict=True)]
    copy = raw_copy(state)
    stalls, ratios, rates = [], [], []
    with Checkpointer(arguments.url or folder, attempt=f"bench-{time.time_ns()}") as checkpointer:
        if arguments.prepare:
            print(f"prepared in {timed(lambda: checkpointer.prepare(pieces, tensors)):.2f} s")
        for number in range(arguments.saves):
            raw_s = min(timed(copy) for _ in range(3))
            stall_s = checkpointer.save(
                number, pieces, tensors=tensors, layout=ParallelLayout(), num_layers=NUM_TENSORS, metadata={}
            )
            (report,) = checkpointer.wait()
            assert report.ok, report.error
            rate = report.data_bytes / report.write_s / 1e9
            print(
                f"save {number}: stall {stall_s * 1e3:.1f} ms, {stall_s / raw_s:.2f}x raw; written at {rate:.2f} GB/s"
            )
            stalls.append(stall_s)
            ratios.append(stall_s / raw_s)
            rates.append(rate)
    print(f"first: {ratios[0]:.2f}x raw; later, median: {statistics.median(stalls[1:]) * 1e3:.1f} ms, "
          f"{statistics.median(ratios[1:]):.2f}x raw; write, median: {statistics.median(rates):.2f} GB/s")  # fmt: skip
    if folder:
        shutil.rmtree(folder)


def raw_copy(state: list[torch.Tensor]) -> Callable[[], None]:
    """A function that copies the state once into memory that is touched (and, for a device, page-locked)."""
    torch.set_num_threads(1)
    on_device = state[0].is_cuda
    target = torch.zeros(sum(t.numel() for t in state), pin_memory=on_device)
    views = list(target.split([t.numel() for t in state]))

    def copy() -> None:
        for view, tensor in zip(views, state, strict=True):
            view.copy_(tensor, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()

    copy()
    return copy


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
