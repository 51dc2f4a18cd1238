"""Inside a step the host reads nothing back from a device, whatever the layout: it would wait for all that is enqueued.

On a CPU each call is an error that returns numbers of a tensor, or a tensor whose size they decide; on a GPU each call
for which torch's host waits. There all ranks are threads that share the GPU, so one is enough for any layout; their
transfers are copies.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.moe import mixture
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.verify.difference import Different
from trainer.verify.host_waits import no_host_waits, watching_tensors
from trainer.verify.threads import run_threads

ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CASES = [  # layout, schedule, parts of cut tokens
    ("tp2", "1f1b", 2), ("pp3", "zb-h1", 1), ("pp2-virtual2", "1f1b", 1), ("tp1", "1f1b", 1), ("dp2", "1f1b", 1),
    ("dp2-pp2-virtual2", "zb-h1", 1), ("tp2-pp2", "gpipe", 2), ("tp2-cp2", "1f1b", 2), ("cp2-pp2", "zb-h1", 1),
    ("cp4", "1f1b", 1),
]  # fmt: skip
MARKED = [pytest.param(*case, marks=[pytest.mark.slow] if place > 2 else []) for place, case in enumerate(CASES)]


@pytest.fixture(autouse=True, scope="module")
def _methods_that_read() -> Iterator[None]:
    with watching_tensors():
        yield


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
def test_a_step_with_a_loss_scale_reads_nothing_back(device: str) -> None:
    run_threads(2, two_steps, small(config_for("llama", ParallelLayout(dp=2), precision="fp16", device=device)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_step_that_rounds_gradients_reads_nothing_back(device: str) -> None:
    config = small(config_for("llama", ParallelLayout(dp=2), device=device))
    run_threads(2, two_steps, replace(config, parallel=replace(config.parallel, grad_reduce="int8")))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_step_of_what_is_cut_reads_nothing_back(zero_stage: Any, device: str) -> None:
    config = small(config_for("llama", ParallelLayout(dp=4), device=device))
    parallel = replace(config.parallel, zero_stage=zero_stage, dp_shard=2, zero_whole_kib=0)
    run_threads(4, two_steps, replace(config, parallel=parallel))


@pytest.mark.parametrize(
    ("name", "layout", "schedule"),
    [
        pytest.param("shared", "tp2", "1f1b", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("shared", "ep2-dp2", "1f1b", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("plain", "dp2-pp2", "zb-h1", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("every second", "cp2", "1f1b", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_a_step_of_experts_reads_nothing_back(name: str, layout: str, schedule: str) -> None:
    """On a CPU, but for the ends of rows: there the products of experts are a loop."""
    parts = {"moe_overlap_parts": 2} if "ep" in layout else {}
    config = mixture(name, layout, schedule=schedule, train={"recompute": "full"}, **parts)
    run_threads(layout_of(config).world_size, two_steps, config)


def test_a_step_that_exchanges_rows_of_experts_waits_for_their_counts() -> None:
    with pytest.raises(Different, match="makes the host wait"):
        run_threads(2, two_steps, mixture("shared", "ep2-dp2", moe_dispatch="alltoall"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_number_that_a_step_reads_is_seen(device: str) -> None:
    config = small(config_for("llama", ParallelLayout(), device=device))
    engine = make_engine(0, config)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    batch = local_batch(config, 1, engine.mesh)
    with (
        pytest.raises((Different, RuntimeError), match=r"makes the host wait|synchronizing"),
        no_host_waits(device),
    ):
        engine.start_step(1, batch, before_update=lambda: float(engine.verdict.is_void))


class Late(torch.autograd.Function):
    """Call a function of the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function(dy)
        return dy, None


def call(function: Callable[[torch.Tensor], object], *, in_backward: bool) -> None:
    x = torch.tensor([3.0, 1.0, 2.0, 1.0])
    with no_host_waits("cpu"):
        if in_backward:
            torch.autograd.backward(Late.apply(x.requires_grad_(), function), x.detach())
        else:
            function(x)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "repr": repr,
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 1),
    "slice": lambda x: x[: (x > 1).sum()],
    "boolean index": lambda x: x[x > 1],
    "boolean index of a dim": lambda x: x.view(2, 2)[:, x[:2] > 1],
    "boolean index that is written": lambda x: x.clone().index_put_((x > 1,), x[:2]),
    "byte index": lambda x: x[(x > 1).to(torch.uint8)],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "argwhere": lambda x: torch.argwhere(x),
    "unique": lambda x: x.unique(),
    "unique rows": lambda x: x.view(2, 2).unique(dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "inverse": lambda x: torch.linalg.inv(x.view(2, 2)),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", WAITS)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_wait_is_seen_on_a_cpu(name: str, in_backward: bool) -> None:
    with pytest.raises(Different, match="makes the host wait"):
        call(WAITS[name], in_backward=in_backward)
    WAITS[name](torch.tensor([3.0, 1.0, 2.0, 1.0]))  # outside it is none


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x.long() - 1],
        lambda x: x.masked_fill(x > 1, 0),
        lambda x: torch.where(x > 1, x, 0),
        lambda x: x.repeat_interleave(2),
        lambda x: x.repeat_interleave(x.long(), output_size=7),
        lambda x: x.to(x.device, torch.float64),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: (x.unbind(), x.sum(), x.argmax(), x.sort(), len(x)),
    ],
)
def test_what_stays_on_a_device_is_no_wait(function: Callable[[torch.Tensor], object]) -> None:
    call(function, in_backward=False)
    call(function, in_backward=True)
