"""Host memory of a save: what trainer and writer hold at most, beside the state itself.

    python benchmarks/ckptkit/save_memory.py [--mib 1024] [--window-mib 0] [--url DIR]

Proportional set sizes (a page that both map counts once), sampled every 10 ms over three saves; prints the sum of both
processes at rest, its peak during the saves and the difference, also as a multiple of the state. Without a window that
is the state's size and a constant, with one the window and a constant.
"""

import argparse
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np

from benchmarks.record import add_option
from ckptkit import Box, Checkpointer, CheckpointerOptions, ParallelLayout, Piece, Placement, TensorInfo

NUM_TENSORS = 64
NUM_SAVES = 3
SAMPLE_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--window-mib", type=int, default=0, help="size of the window; 0: room for the whole state")
    parser.add_argument("--url", help="run URL to save to; a temporary folder if left out")
    add_option(parser)
    arguments = parser.parse_args()
    folder = None if arguments.url else tempfile.mkdtemp(prefix="save-memory-")
    numel = (arguments.mib << 20) // 4 // NUM_TENSORS
    tensors = [TensorInfo(f"layers.{n}.weight", "F32", (numel,), Placement(n)) for n in range(NUM_TENSORS)]
    pieces = [Piece.whole(t.name, Box((0,), (numel,)), np.full(numel, 1.0, np.float32)) for t in tensors]
    rest_mib = pss_mib("self")
    options = CheckpointerOptions(window_bytes=arguments.window_mib << 20)
    with Checkpointer(arguments.url or folder, attempt="bench", options=options) as checkpointer:
        peaks = [0.0]
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_S):
                peaks.append(pss_mib("self") + pss_mib(str(checkpointer.writer_pid)))

        sampling = threading.Thread(target=sample)
        sampling.start()
        for step in range(NUM_SAVES):
            checkpointer.save(
                step, pieces, tensors=tensors, layout=ParallelLayout(), num_layers=NUM_TENSORS, metadata={}
            )
            assert all(report.ok for report in checkpointer.wait())
        done.set()
        sampling.join()
    more_mib = max(peaks) - rest_mib
    print(f"state {arguments.mib} MiB, window {arguments.window_mib or 'none'}: at rest {rest_mib:.0f} MiB, with saves "
          f"{max(peaks):.0f} MiB: {more_mib:.0f} MiB more, {more_mib / arguments.mib:.2f}x the state")  # fmt: skip
    claim = f"host memory of a save, window of {arguments.window_mib or arguments.mib} MiB"
    arguments.record.add(claim, more_mib, "MiB", limit={"the state": arguments.mib})
    if folder:
        shutil.rmtree(folder)


def pss_mib(process: str) -> float:
    """Proportional set size of a process, its share of the pages that it maps with others."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
