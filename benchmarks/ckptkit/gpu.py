"""What a save costs a training loop on one GPU, beside torch DCP's async_save and the raw copy, in the same run.

    python benchmarks/ckptkit/gpu.py --folder /data

The loop trains a stack of MLPs in bf16 with fp32 master weights and fused AdamW; its 14 GB of state are saved every few
steps. Printed are the raw copy of the state into page-locked memory; for each way to save, how long the save call (and,
where there is one, the join before the update) held the loop up, and each step's time as a multiple of the usual one.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.record import add_option
from ckptkit import Box, Checkpointer, ParallelLayout, Piece, Placement, TensorInfo

KINDS = {"": torch.bfloat16, "optim.master/": torch.float32, "optim.exp_avg/": torch.float32,
         "optim.exp_avg_sq/": torch.float32}  # fmt: skip
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


class Loop:
    """A training loop whose step takes as long as that of a GPT with as many parameters."""

    def __init__(self, *, hidden: int, layers: int, tokens: int) -> None:
        blocks = [
            nn.Sequential(
                nn.Linear(hidden, 4 * hidden, bias=False), nn.GELU(), nn.Linear(4 * hidden, hidden, bias=False)
            )
            for _ in range(layers)
        ]
        with torch.no_grad():
            self.model = nn.ModuleList(blocks).to("cuda", torch.bfloat16)
        self.params = list(self.model.parameters())
        self.master = [p.detach().float() for p in self.params]
        self.moments = [torch.zeros_like(p) for p in self.master], [torch.zeros_like(p) for p in self.master]
        self.counts = [torch.zeros((), device="cuda") for _ in self.params]
        self.batch = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint holds, by name."""
        lists = dict(zip(KINDS, (self.params, self.master, *self.moments), strict=True))
        return {f"{kind}layers.{n}.weight": t.detach() for kind, held in lists.items() for n, t in enumerate(held)}

    def forward_backward(self) -> None:
        x = self.batch
        for block in self.model:
            x = x + block(x)
        x.float().square().mean().backward()

    def update(self) -> None:
        grads = [p.grad.float() for p in self.params]
        torch._foreach_add_(self.counts, 1)
        torch._fused_adamw_(
            self.master, grads, *self.moments, [], self.counts, lr=1e-5, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.master)
        for p in self.params:
            p.grad = None

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Run one step and return its seconds."""
        started = time.perf_counter()
        self.forward_backward()
        before_update()
        self.update()
        torch.cuda.synchronize()
        return time.perf_counter() - started


class OurSaves:
    """ckptkit, blocking or overlapped."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor], *, overlap: bool) -> None:
        self._folder, self._overlap = folder, overlap
        self._tensors = [
            TensorInfo(name, DTYPES[t.dtype], tuple(t.shape), Placement(int(name.split(".")[-2])))
            for name, t in state.items()
        ]
        self._pieces = [
            Piece.whole(name, Box((0,) * t.dim(), tuple(t.shape)), t.reshape(-1)) for name, t in state.items()
        ]
        self._checkpointer = Checkpointer(str(folder), attempt=f"bench-{overlap:d}")
        self._checkpointer.prepare(self._pieces, self._tensors)

    def save(self, step: int) -> None:
        self._checkpointer.save(
            step, self._pieces, tensors=self._tensors, layout=ParallelLayout(), num_layers=1000, metadata={},
            overlap=self._overlap,
        )  # fmt: skip

    def join(self) -> None:
        self._checkpointer.join()

    def wait(self) -> str:
        (report,) = self._checkpointer.wait()
        return report.error

    def close(self) -> None:
        self._checkpointer.close()


class DcpSaves:
    """torch DCP's async_save, with one of its ways of staging."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor], *, pinned: bool) -> None:
        self._folder, self._state = folder, state
        options = StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True
        )
        self._stager = DefaultStager(options) if pinned else None
        self._running: list = []

    def save(self, step: int) -> None:
        more = {"async_stager": self._stager} if self._stager else {}
        writer = dcp.FileSystemWriter(self._folder / f"step-{step:09d}", thread_count=2)
        result = dcp.async_save(dict(self._state), storage_writer=writer, **more)
        self._running = [result] if not hasattr(result, "upload_completion") else [
            result.staging_completion, result.upload_completion]  # fmt: skip

    def join(self) -> None:
        if len(self._running) == 2:
            self._running[0].result()  # staging must be over before the state changes

    def wait(self) -> str:
        try:
            self._running[-1].result()
        except Exception as error:  # the peer's own, told in the table
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        if self._stager:
            self._stager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="a folder of the disk to save to; temporary ones are made there"
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=49152, help="tokens a step")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--peer-saves", type=int, default=2)
    add_option(parser)
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    loop = Loop(hidden=arguments.hidden, layers=arguments.layers, tokens=arguments.tokens)
    state = loop.state
    num_bytes = sum(t.numel() * t.element_size() for t in state.values())
    for _ in range(10):
        loop.step()
    usual_s = statistics.median(loop.step() for _ in range(10))
    raw_s = raw_copy(state)
    print(
        f"{torch.cuda.get_device_name()}: {num_bytes / 1e9:.2f} GB of state, a step {usual_s * 1e3:.0f} ms, raw copy "
        f"into page-locked memory {raw_s * 1e3:.0f} ms ({num_bytes / raw_s / 1e9:.1f} GB/s)",
        flush=True,
    )
    ways: dict[str, tuple[Callable[[Path], OurSaves | DcpSaves], int]] = {
        "ckptkit, blocking": (lambda f: OurSaves(f, state, overlap=False), arguments.saves),
        "ckptkit, overlapped": (lambda f: OurSaves(f, state, overlap=True), arguments.saves),
        "dcp.async_save": (lambda f: DcpSaves(f, state, pinned=False), arguments.peer_saves),
        "dcp.async_save, pinned": (lambda f: DcpSaves(f, state, pinned=True), arguments.peer_saves),
    }
    stalls_s: dict[str, list[float]] = {}
    for name, (make, num_saves) in ways.items():
        with tempfile.TemporaryDirectory(prefix="gpu-", dir=arguments.folder) as temporary:
            folder = Path(temporary)
            started = time.perf_counter()
            saves = make(folder)
            print(f"{name}: ready in {time.perf_counter() - started:.1f} s")
            for number in range(num_saves):
                seconds = measure(loop, saves, folder, number, usual_s=usual_s, raw_s=raw_s, num_bytes=num_bytes)
                stalls_s.setdefault(name, []).extend(seconds)
            saves.close()
    stalls_ms = {name: 1e3 * statistics.median(seconds) for name, seconds in stalls_s.items() if seconds}
    claim = f"what an overlapped save of {num_bytes / 1e9:.2f} GB stops a step"
    peers = {name: stall_ms for name, stall_ms in stalls_ms.items() if name.startswith("dcp")}
    limit = {"raw copy to page-locked memory": 1e3 * raw_s}
    arguments.record.add(claim, stalls_ms["ckptkit, overlapped"], "ms", peer=peers, limit=limit)
    dist.destroy_process_group()


def measure(
    loop: Loop, saves: OurSaves | DcpSaves, folder: Path, number: int, *, usual_s: float, raw_s: float, num_bytes: int
) -> list[float]:
    """Make one save and the steps beside it; return the seconds that it stopped the loop, none if it failed.

    The last step ends after the save is durable, and the GPU is as warm as in the usual steps.
    """
    for _ in range(10):
        loop.step()
    started = time.perf_counter()
    held_s = []

    def join() -> None:
        joined = time.perf_counter()
        saves.join()
        held_s.append(time.perf_counter() - joined)

    try:
        saves.save(number)
    except Exception as error:  # a peer that fails is told, the others go on
        print(f"  save {number}: {type(error).__name__}: {error}", flush=True)
        return []
    call_s = time.perf_counter() - started
    first_s = loop.step(join)
    later = [loop.step() for _ in range(10)]
    error = saves.wait()
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / f"step-{number:09d}", ignore_errors=True)
    print(
        f"  save {number}: call {call_s * 1e3:.0f} ms = {call_s / raw_s:.2f}x raw, join {held_s[0] * 1e3:.0f} ms; the "
        f"step with the save {(call_s + first_s) / usual_s:.3f}x usual, the ten after it median "
        f"{statistics.median(later) / usual_s:.3f}x, worst {max(later) / usual_s:.3f}x; "
        + (f"failed: {error}" if error else f"durable after {seconds:.1f} s, {num_bytes / seconds / 1e9:.2f} GB/s"),
        flush=True,
    )
    return [] if error else [call_s + held_s[0]]


def raw_copy(state: dict[str, torch.Tensor]) -> float:
    """Seconds of a copy of the state into page-locked memory, the best of three."""
    targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state.values()]
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for target, source in zip(targets, state.values(), strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
