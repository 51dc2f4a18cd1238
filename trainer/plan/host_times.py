"""What the host takes: to start a kernel, for the passes of a layer, for what is made again, and for calls of a group.

Those of a layer are slopes: of steps of an engine, over layers and micro-batches, whose arithmetic takes next to
nothing. So nothing that a step does once is in them, and each pass is what it is in a run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch

from trainer.config import Config, ModelConfig, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.mesh.clock import Moment
from trainer.mesh.mesh import ProcessMesh, mesh_of
from trainer.model.microbatch import Batch
from trainer.plan.volumes import VolumeTable
from trainer.run.stage_times import Nobody, stage_times, step_times

LAUNCHES, NUM_STEPS, LEAST_S = 2000, 9, 1e-6
FEW, MORE = (2, 2), (10, 6)  # layers and micro-batches


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


def host_s(ranks: Ranks) -> dict[str, float]:
    """Return what the host takes for F and B of a layer, to make its norms `again` behind B, and for a `call` of a
    group if the ranks are even in number; all ranks call it."""
    device = ranks.device

    def mesh_alone(config: Config) -> ProcessMesh:
        return mesh_of(config, 0, device, network=Nobody(1))

    def alone(layers: int, micro_batches: int) -> float:
        return step_s(host_config(layers, micro_batches, device), mesh_alone)

    def again(layers: int, micro_batches: int) -> float:
        config = host_config(layers, micro_batches, device)
        return step_s(replace(config, train=replace(config.train, recompute="selective")), mesh_alone)

    def cut(layers: int, micro_batches: int) -> float:
        config = host_config(layers, micro_batches, device, ranks.world_size)
        return step_s(config, lambda config: mesh_of(config, ranks.rank, device))

    passes = [stage_times(host_config(layers, 1, device), device) for layers in (FEW[0], MORE[0])]
    forward, backward = (
        max(sum(passes[1][kind, 0] - passes[0][kind, 0] for kind in way), LEAST_S) for way in ("F", "BW")
    )
    whole = slope(alone)
    share = whole / (forward + backward)  # a step's passes take longer than those alone
    times = {"F": forward * share, "B": backward * share, "again": max(slope(again) - whole, LEAST_S)}
    if ranks.world_size % 2 == 0:
        calls = VolumeTable().of(host_config(1, 1, device, ranks.world_size)).layer.total()
        (of_layer,) = ranks.maximum([slope(cut)])
        times["call"] = max((of_layer - whole) / calls, LEAST_S)
    return times


def slope(seconds: Callable[[int, int], float]) -> float:
    """Return what a layer adds for a micro-batch, from the seconds of steps of so many of both.

    With 1 + layers * micro-batches seconds it is 1.
    """
    added = [seconds(MORE[0], number) - seconds(FEW[0], number) for number in (FEW[1], MORE[1])]
    return max(added[1] - added[0], LEAST_S) / (MORE[0] - FEW[0]) / (MORE[1] - FEW[1])


def host_config(layers: int, micro_batches: int, device: torch.device, world_size: int = 1) -> Config:
    """Return a run of short kernels; on several ranks each neighbour has half of each layer."""
    on_gpu = device.type == "cuda"
    parallel = ParallelConfig(tp=gcd(2, world_size))
    model = ModelConfig(hidden_size=128, num_heads=2, num_layers=layers, vocab_size=128)
    samples = micro_batches * world_size // parallel.tp
    train = TrainConfig(seq_length=16, micro_batch_size=1, global_batch_size=samples, deterministic=True)
    train = replace(train, precision="bf16" if on_gpu else "fp32", device="cuda" if on_gpu else "cpu")
    return resolve(Config(model=model, parallel=parallel, train=train), world_size)


def step_s(config: Config, mesh: Callable[[Config], ProcessMesh]) -> float:
    """Return the median seconds of a step of a rank, in the mesh of a configuration."""
    engine = Engine(config, mesh(config))
    device = engine.mesh.device
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
