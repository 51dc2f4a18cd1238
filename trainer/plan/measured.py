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
from dataclasses import replace
from itertools import cycle, pairwise

import torch

from ckptkit import ParallelLayout
from threefold import __version__
from trainer.config import Config, ModelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.mesh.clock import Moment
from trainer.mesh.mesh import ProcessMesh, mesh_of
from trainer.model.microbatch import Batch
from trainer.plan.calibration import UNITS, Calibration, PartRate
from trainer.plan.probes import OF_CPU, OF_GPU, Probe, Scale, probes
from trainer.run.bench_comm import rows_of_groups
from trainer.run.stage_times import stage_times, step_times

LAUNCHES, REPEATS, NUM_STEPS = 2000, 10, 15
FEW_LAYERS, MORE_LAYERS, FEW_MICRO_BATCHES, MORE_MICRO_BATCHES = 2, 10, 2, 10
BESIDE = 0.2  # of the time of products: what attention takes in a round, and all other kernels
OPERATIONS_S, BYTES_S = 6e14, 2e12  # by which that time is guessed
COLLECTIVE_MIB = (0.0625, 1.0, 16.0, 128.0)


def measure(ranks: Ranks, seconds: float, say: Callable[[str], None], scale: Scale | None = None) -> Calibration:
    """Return the calibration of this rank's device; all ranks call it, and take about so many seconds."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    scale = scale or (OF_GPU if on_gpu else OF_CPU)
    capacity = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_bytes()
    known, figures = working(list(probes(device, capacity, scale)), device, say), list[PartRate]()
    host = launch_s(device), host_s(device)
    times = timed(known, device, seconds)
    for number, probe in enumerate(known):
        for way, work in probe.work.items():
            figures.append(PartRate(probe.part, way, probe.dtype, probe.place, work, times[number, way]))
    if ranks.world_size > 1:
        mesh = ProcessMesh(ParallelLayout(dp=ranks.world_size), ranks.rank, device, timeout_s=seconds + 300)
        for row in rows_of_groups(ranks, mesh, COLLECTIVE_MIB, REPEATS):
            place = float(row.num_bytes), float(row.num_ranks)
            carried = row.bus_bytes_per_s * row.seconds
            figures.append(PartRate("collective", row.operation, "any", place, carried, row.seconds))
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
    kinds = [probe.part if probe.part in UNITS else "kernel" for probe in known]
    of_kind = {kind: [number for number, own in enumerate(kinds) if own == kind] for kind in (*UNITS, "kernel")}
    rests = {kind: cycle(numbers) for kind, numbers in of_kind.items() if kind != "product" and numbers}
    order = list[int]()

    def add(number: int) -> None:
        order.append(number)
        rate = OPERATIONS_S if known[number].part in UNITS else BYTES_S
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


def launch_s(device: torch.device) -> float:
    """Return what the host takes to start a small kernel."""
    number = torch.zeros(1, device=device)
    for _ in range(LAUNCHES):
        number.add_(1)
    Moment(device).wait()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1)
    return (time.perf_counter() - begin) / LAUNCHES


def host_s(device: torch.device) -> dict[str, float]:
    """Return what the host takes for the passes F and B of a layer, whose arithmetic takes next to nothing.

    Passes alone are faster than those of a step, so their sum is that of steps, whose numbers of layers and of
    micro-batches differ.
    """
    one, other = (stage_times(host_config(num_layers, 1, device), device) for num_layers in (FEW_LAYERS, MORE_LAYERS))
    between = MORE_LAYERS - FEW_LAYERS
    forward = max(other["F", 0] - one["F", 0], 1e-6)
    backward = max(sum(other[kind, 0] - one[kind, 0] for kind in "BW"), 1e-6)
    less, more = (
        step_s(host_config(MORE_LAYERS, number, device), device)
        - step_s(host_config(FEW_LAYERS, number, device), device)
        for number in (FEW_MICRO_BATCHES, MORE_MICRO_BATCHES)
    )
    whole = max(more - less, 2e-6) / between / (MORE_MICRO_BATCHES - FEW_MICRO_BATCHES)
    return {"F": whole * forward / (forward + backward), "B": whole * backward / (forward + backward)}


def host_config(num_layers: int, num_micro_batches: int, device: torch.device) -> Config:
    """Return a run of short kernels."""
    on_gpu = device.type == "cuda"
    model = ModelConfig(hidden_size=128, num_heads=2, num_layers=num_layers, vocab_size=128)
    train = TrainConfig(seq_length=16, micro_batch_size=1, global_batch_size=num_micro_batches, deterministic=True)
    train = replace(train, precision="bf16" if on_gpu else "fp32", device="cuda" if on_gpu else "cpu")
    return resolve(Config(model=model, train=train), 1)


def step_s(config: Config, device: torch.device) -> float:
    """Return the median seconds of a step of one rank."""
    engine = Engine(config, mesh_of(config, 0, device))
    engine.initialise()
    engine.choose_ops({}, by_timing=False)
    shape = config.train.gradient_accumulation_steps, config.train.micro_batch_size, config.train.seq_length
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    batch = Batch(
        tokens, tokens, torch.arange(shape[2], device=device).expand(shape), torch.ones(shape, device=device), 0
    )
    times = step_times(engine, batch, NUM_STEPS)
    engine.close()
    return statistics.median(times[NUM_STEPS // 3 :])
