"""What `trainer bench gpu` measures: rounds over all probes, mixed as in a step, so that each is timed between others.

A GPU under load has less power for each product than one that rests, and kernels that move bytes are such a rest. What
a kernel reads is not in a cache, either. The host enqueues a round and waits at its end. The first round is not
counted, a figure is the median of the others. What fails on a device, such as products in eight bits, is left out and
said.
"""

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle, pairwise

import torch

from ckptkit import ParallelLayout
from threefold import __version__
from trainer.job.ranks import Ranks
from trainer.mesh.clock import Moment
from trainer.mesh.mesh import ProcessMesh
from trainer.plan.calibration import Calibration, PartRate
from trainer.plan.calls import call_figures
from trainer.plan.host_times import host_s, launch_s
from trainer.plan.probes import OF_CPU, OF_GPU, Probe, Scale, probes

ARITHMETIC = ("product", "attention")  # parts whose work is operations
BESIDE = 0.2  # of the time of products: what attention takes in a round, and all other kernels
OPERATIONS_S, BYTES_S = 6e14, 2e12  # by which that time is guessed


def measure(ranks: Ranks, seconds: float, say: Callable[[str], None], scale: Scale | None = None) -> Calibration:
    """Return the calibration of this rank's device; all ranks call it, and take about so many seconds."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    scale = scale or (OF_GPU if on_gpu else OF_CPU)
    capacity = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_bytes()
    begin = time.monotonic()
    known, figures = working(list(probes(device, capacity, scale)), device, say), list[PartRate]()
    host = launch_s(device), host_s(ranks)
    if ranks.world_size > 1:
        mesh = ProcessMesh(ParallelLayout(dp=ranks.world_size), ranks.rank, device, timeout_s=seconds + 300)
        figures += call_figures(ranks, mesh, scale)
    (spent,) = ranks.maximum([time.monotonic() - begin])
    times = timed(known, device, max(seconds - spent, seconds / 3))
    for number, probe in enumerate(known):
        for way, work in probe.work.items():
            figures.append(PartRate(probe.part, way, probe.dtype, probe.place, work, times[number, way]))
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    versions = {"threefold": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"cuda": str(torch.version.cuda)} if on_gpu else {}
    return Calibration(name, versions, float(capacity), *host, tuple(figures))


def working(known: list[Probe], device: torch.device, say: Callable[[str], None]) -> list[Probe]:
    """Return the probes that run here, and say why others do not."""
    working, left = list[Probe](), dict[tuple[str, str], list[str]]()
    for probe in known:
        try:
            for _ in probe.run():
                Moment(device).wait()
            working.append(probe)
        except Exception as error:  # e.g. a format that the device lacks, or no memory
            reason = str(error).strip().splitlines() or [type(error).__name__]
            left.setdefault((probe.part, probe.dtype), []).append(reason[0])
    for (part, dtype), reasons in left.items():
        say(f"{len(reasons)} of {part} in {dtype} left out: {reasons[0]}")
    return working


def timed(known: list[Probe], device: torch.device, seconds: float) -> dict[tuple[int, str], float]:
    """Return the median seconds of each pass of each probe."""
    by_pass: dict[tuple[int, str], list[float]] = defaultdict(list)
    order, end, is_warm = mixed(known), time.monotonic() + seconds, False
    while not by_pass or time.monotonic() < end:
        moments = [(number, [Moment(device) for _ in known[number].run()]) for number in order]
        for number, marks in moments:
            for way, (begin, after) in zip(known[number].work, pairwise(marks), strict=True):
                if is_warm:
                    by_pass[number, way].append(after.seconds_since(begin))
        is_warm = True
    return {key: max(statistics.median(spans), 1e-9) for key, spans in by_pass.items()}


def mixed(known: list[Probe]) -> list[int]:
    """Return the order of a round: behind each product those of attention and of other kernels that are due, the ones
    with few operations many times.

    With two products of a second and a kernel of 0.1 s the kernel is run twice behind each.
    """
    spent: dict[str, float] = defaultdict(float)
    kinds = [probe.part if probe.part in ARITHMETIC else "kernel" for probe in known]
    of_kind = {kind: [number for number, own in enumerate(kinds) if own == kind] for kind in (*ARITHMETIC, "kernel")}
    rests = {kind: cycle(numbers) for kind, numbers in of_kind.items() if kind != "product" and numbers}
    order = list[int]()

    def add(number: int) -> None:
        order.append(number)
        rate = OPERATIONS_S if known[number].part in ARITHMETIC else BYTES_S
        spent[kinds[number]] += sum(known[number].work.values()) / rate

    for number in of_kind["product"]:
        add(number)
        for kind, numbers in rests.items():
            while spent[kind] < BESIDE * spent["product"]:
                add(next(numbers))
    left = set(range(len(known))) - set(order)
    return order + [number for number in range(len(known)) if number in left]


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
