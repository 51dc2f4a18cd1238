"""How long a save stops training, as a multiple of the raw copy of the same bytes in the same run.

    python benchmarks/ckptkit/save_stall.py [--gib 1] [--device cpu|cuda] [--repeats 5] [--starts 5]
        [--step-ms 500] [--window-mib 256] [--tensors 256] [--no-peers] [--url DIR]

Raw is one thread's memcpy into touched memory (cpu) or the copy into page-locked memory (cuda), made once for each
save, in every second round after it, behind a step as the save is and into memory of the form's own: what lay idle, as
an arena does between saves, is copied to more slowly at first, in a virtual machine up to twice as slowly, whoever
copies. Each round runs every form once: our blocking save, the overlapped one (with the next step's work between its
begin and its join), the one through a window, and `torch.distributed.checkpoint.async_save` with a thread, with a
process, and with its stager that keeps its memory. A form's stall is what its calls took: what else the step lost
beside it, against the same step alone, is printed too. First saves stand apart, ours of several Checkpointers: peers
take their memory then, ours took it in `prepare`. What a save costs beside the copy shows with little state in many
tensors: --gib 0.01 --tensors 20000.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring import touch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.record import add_option
from ckptkit import Box, Checkpointer, CheckpointerOptions, ParallelLayout, Piece, Placement, TensorInfo

State = dict[str, torch.Tensor]
Work = Callable[[], None]
Form = Callable[[Work], tuple[float, Work]]  # a step with a save: its stall, and what waits until the save is durable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5, help="saves of each form after the first")
    parser.add_argument("--starts", type=int, default=5, help="fresh Checkpointers whose first save is timed")
    parser.add_argument("--step-ms", type=float, default=500.0, help="length of a step")
    parser.add_argument("--window-mib", type=int, default=256, help="the window of the form that has one")
    parser.add_argument("--tensors", type=int, default=256, help="how many tensors the state has")
    parser.add_argument("--no-peers", action="store_true", help="our forms only")
    parser.add_argument("--url", help="folder to save to; a temporary one if left out")
    add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="save-stall-", dir=arguments.url))
    numel = int(arguments.gib * 2**30) // 4 // arguments.tensors
    state = {f"layers.{n}.weight": torch.rand(numel, device=arguments.device) for n in range(arguments.tensors)}
    step = step_of(arguments.device, arguments.step_ms / 1e3)
    turns: dict[str, list[Turn]] = {}

    def turn(name: str, form: Form, copy: Work, number: int) -> None:
        """One save of a form; in every second round before the raw copy."""

        def raw() -> float:
            step()
            touch(state.values())
            return timed(copy)

        raw_s = 0.0 if number % 2 else raw()
        alone_s = statistics.median(timed(step) for _ in range(3))
        touch(state.values())
        started = time.perf_counter()
        stall_s, until_durable = form(step)
        step_s = time.perf_counter() - started
        until_durable()
        if number % 2:
            raw_s = raw()
        turns.setdefault(name, []).append(Turn(stall_s, stall_s / raw_s, step_s / alone_s))
        print(f"{name}: {turns[name][-1]}", flush=True)

    for number in range(arguments.starts):
        copy = raw_copy(state)
        with own_saves(folder / f"start-{number}", state) as form:
            turn("blocking, first save", form, copy, number)
    with ExitStack() as stack:
        forms = {
            "blocking": stack.enter_context(own_saves(folder / "blocking", state)),
            "overlapped": stack.enter_context(own_saves(folder / "overlapped", state, overlap=True)),
            "window": stack.enter_context(own_saves(folder / "window", state, window_bytes=arguments.window_mib << 20)),
        }
        if not arguments.no_peers:
            stack.enter_context(process_group())
            kinds = AsyncCheckpointerType
            forms["dcp thread"] = peer(folder / "thread", state, async_checkpointer_type=kinds.THREAD)
            forms["dcp process"] = peer(folder / "process", state, async_checkpointer_type=kinds.PROCESS)
            is_cuda = arguments.device == "cuda"
            kept = StagingOptions(
                use_pinned_memory=is_cuda, use_shared_memory=is_cuda, use_async_staging=is_cuda,
                use_non_blocking_copy=is_cuda,
            )  # fmt: skip
            forms["dcp thread, kept memory"] = peer(folder / "kept", state, async_stager=DefaultStager(kept))
        copies = {name: raw_copy(state) for name in forms}
        for number in range(arguments.repeats + 1):
            for name, form in list(forms.items()):
                try:
                    turn(name if number else f"{name}, first save here", form, copies[name], number)
                except Exception as failure:  # a peer's pinned modes fail at their second save
                    print(f"{name}: failed: {failure!r}")
                    del forms[name]
    print("medians:")
    medians = {name: Turn(*map(statistics.median, zip(*saves, strict=True))) for name, saves in turns.items()}
    for name, median in medians.items():
        print(f"{name} ({len(turns[name])}): {median}")
    stalls_ms = {name: 1e3 * median.stall_s for name, median in medians.items()}
    claim = f"what an overlapped save of {arguments.gib:g} GiB stops a step, {arguments.device}"
    peers = {name: stall_ms for name, stall_ms in stalls_ms.items() if name.startswith("dcp") and name in forms}
    limit = {"raw copy": stalls_ms["overlapped"] / medians["overlapped"].ratio}
    arguments.record.add(claim, stalls_ms["overlapped"], "ms", peer=peers, limit=limit)
    shutil.rmtree(folder)


class Turn(NamedTuple):
    """A save beside the raw copy, and the step it was in beside the step alone."""

    stall_s: float
    ratio: float
    step_ratio: float

    def __str__(self) -> str:
        return f"stall {self.stall_s * 1e3:.1f} ms, {self.ratio:.2f}x raw, step {self.step_ratio:.3f}x"


def raw_copy(state: State) -> Work:
    """Return a function that copies the state once into memory that is touched (and, for a device, page-locked)."""
    tensors = list(state.values())
    on_device = tensors[0].is_cuda
    target = torch.zeros(sum(t.numel() for t in tensors), pin_memory=on_device)
    views = list(target.split([t.numel() for t in tensors]))

    def copy() -> None:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()

    copy()
    return copy


def step_of(device: str, seconds: float) -> Work:
    """Matrix products for about so many seconds, done when it returns."""
    size = 8192 if device == "cuda" else 512
    a = torch.rand(size, size, device=device)
    b = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=b)
        if device == "cuda":
            torch.cuda.synchronize()

    products(3)
    count = max(int(seconds / (timed(lambda: products(10)) / 10)), 1)
    return lambda: products(count)


@contextmanager
def own_saves(folder: Path, state: State, *, overlap: bool = False, window_bytes: int = 0) -> Iterator[Form]:
    """Saves of ours."""
    tensors = [TensorInfo(name, "F32", tuple(data.shape), Placement(n)) for n, (name, data) in enumerate(state.items())]
    pieces = [Piece.whole(t.name, Box((0,), t.shape), state[t.name]) for t in tensors]
    options, layout, numbers = CheckpointerOptions(window_bytes=window_bytes), ParallelLayout(), itertools.count()
    with Checkpointer(str(folder), attempt="bench", options=options) as checkpointer:
        checkpointer.prepare(pieces, tensors)

        def until_durable() -> None:
            (report,) = checkpointer.wait()
            assert report.ok, report.error
            shutil.rmtree(folder)

        def form(step: Work) -> tuple[float, Work]:
            stall_s = checkpointer.save(
                next(numbers), pieces, tensors=tensors, layout=layout, num_layers=len(tensors), metadata={},
                overlap=overlap,
            )  # fmt: skip
            step()
            return stall_s + checkpointer.join(), until_durable

        yield form


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of this process alone, which the peer's process mode wants."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def peer(folder: Path, state: State, **options: Any) -> Form:
    """Saves of the peer, staged when it returns."""
    numbers = itertools.count()

    def form(step: Work) -> tuple[float, Work]:
        path = folder / str(next(numbers))
        started = time.perf_counter()
        answer: Any = dcp.async_save(dict(state), storage_writer=dcp.FileSystemWriter(path), **options)
        stall_s = time.perf_counter() - started
        step()
        if isinstance(answer, AsyncSaveResponse):
            stall_s += timed(answer.staging_completion.result)
            answer = answer.upload_completion

        def until_durable() -> None:
            answer.result()
            shutil.rmtree(path)

        return stall_s, until_durable

    return form


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
