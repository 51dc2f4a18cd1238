"""A small training program under every wrapper, which the ranks of tests/ckptkit/torch run."""

from typing import Any

from ckptkit.torch import LoadReport, Run
from tests.support.checks import require

SIZES = (7, 10, 5)  # 5 rows are cut unevenly, as are 10 by tensor parallelism and then FSDP2


def make(layout: str, device: str = "cpu") -> tuple[Any, Any, Any]:
    """Return the model in a wrapper, its optimizer and its scheduler; the same values under any layout."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    first, middle, last = SIZES
    model: Any = nn.Sequential(
        nn.Linear(first, middle), nn.Tanh(), nn.Linear(middle, middle), nn.LayerNorm(middle), nn.Linear(middle, last)
    ).double().to(device)  # fmt: skip
    model = wrapped(model, layout, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def wrapped(model: Any, layout: str, device: str) -> Any:
    import torch.distributed as dist
    from torch import nn

    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "one":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = dist.get_world_size()
    shape = (size,) if layout == "fsdp" or size == 2 else (2, size // 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    if layout.endswith("tp"):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh if mesh.ndim == 1 else mesh["inner"], plan)
    if layout != "tp":
        over = mesh["outer"] if layout == "fsdp_tp" else mesh
        for number in (0, 2, 4):
            fully_shard(model[number], mesh=over)
        fully_shard(model, mesh=over)
    return model


def batch(step: int) -> Any:
    import torch

    return torch.randn(6, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    losses, device = [], next(model.parameters()).device
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def save_at(
    rank: int, layout: str, url: str, step: int, overlap: bool = False, device: str = "cpu"
) -> list[float]:  # fmt: skip
    """Train to a step, save it, train on for three steps; return the losses of these."""
    model, optimizer, scheduler = make(layout, device)
    train(model, optimizer, scheduler, range(step))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": True, "step": step}
    with Run(url) as run:
        run.save(step, state, metrics={"loss": 1.0}, overlap=overlap)
        losses = train(model, optimizer, scheduler, range(step, step + 3))
        [report] = run.wait()
        require(report.ok, str(report))
    return losses


def load_at(rank: int, layout: str, url: str, device: str = "cpu") -> tuple[LoadReport, list[float]]:
    """Load the newest step under another layout, train on for three steps; return the losses of these."""
    model, optimizer, scheduler = make(layout, device)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": True, "step": 0}
    with Run(url) as run:
        report = run.load(state)
        return report, train(model, optimizer, scheduler, range(state["step"], state["step"] + 3))
