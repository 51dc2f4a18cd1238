"""Inside a step the host reads nothing back from a device, whatever the layout: it would wait for all that is enqueued.

On a CPU each read of a number out of a tensor is an error, on a GPU each call for which torch's host waits. There all
ranks are threads that share the GPU, so one is enough for any layout; their transfers are copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.threads import run_threads
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.mesh.group import Network

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CASES = [  # layout, schedule, parts of cut tokens
    ("tp2", "1f1b", 2), ("pp3", "zb-h1", 1), ("pp2-virtual2", "1f1b", 1), ("tp1", "1f1b", 1), ("dp2", "1f1b", 1),
    ("dp2-pp2-virtual2", "zb-h1", 1), ("tp2-pp2", "gpipe", 2),
]  # fmt: skip
MARKED = [pytest.param(*case, marks=[pytest.mark.slow] if place > 2 else []) for place, case in enumerate(CASES)]


class NoReads(TorchDispatchMode):
    """An error for each operation that returns numbers of a tensor to Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} makes the host wait"
        return func(*args, **kwargs or {})


@contextmanager
def no_host_waits(device: str) -> Iterator[None]:
    if device == "cpu":
        with NoReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def two_steps(rank: int, config: Config, *, network: Network | None = None) -> None:
    """Train the second without a wait: from it on a run knows when each sum of gradients may begin."""
    engine = make_engine(rank, config, network=network)
    batches = [local_batch(config, step, engine.mesh) for step in range(2)]
    engine.train_step(0, batches[0])
    meet(engine)  # what one GPU is asked for holds for all ranks that share it
    with no_host_waits(config.train.device):
        pending = engine.start_step(1, batches[1])
        meet(engine)
    assert pending.read().loss > 0


def meet(engine: Engine) -> None:
    """Wait until all ranks are here."""
    engine.mesh.world.all_reduce(torch.zeros(1, device=engine.mesh.device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
@pytest.mark.parametrize(("layout", "schedule", "num_parts"), MARKED)
def test_a_step_reads_nothing_back(layout: str, schedule: Any, num_parts: int, model: str, device: str) -> None:
    config = small(config_for(model, ParallelLayout.parse(layout), device=device))
    parallel = replace(config.parallel, schedule=schedule, tp_overlap_parts=num_parts)
    config = replace(config, parallel=parallel, model=replace(config.model, num_layers=4))
    run_threads(layout_of(config).world_size, two_steps, config)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_number_that_a_step_reads_is_seen(device: str) -> None:
    config = small(config_for("llama", ParallelLayout(), device=device))
    engine = make_engine(0, config)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    batch = local_batch(config, 1, engine.mesh)
    with (
        pytest.raises((AssertionError, RuntimeError), match=r"makes the host wait|synchronizing"),
        no_host_waits(device),
    ):
        engine.start_step(1, batch, before_update=lambda: float(engine.verdict.is_bad))
