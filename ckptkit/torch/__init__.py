"""Checkpoints of any PyTorch program: modules, optimizers, DTensors, and what is not a tensor, by one call each way.

    with Run("runs/a") as run:
        run.save(100, {"model": model, "optimizer": optimizer, "rng": True}, metrics={"val_loss": 2.1})
        run.load({"model": model, "optimizer": optimizer, "rng": True})

This folder alone of ckptkit imports torch, beside functions of io/torch_tensors.py; `import ckptkit` leaves it out. All
ranks of a job call `save` and `load` together, with the same keys; without torch.distributed one process is all ranks.
DcpWriter and DcpReader are for programs that call torch.distributed.checkpoint, and imported at their first use.
"""

from typing import TYPE_CHECKING

from threefold.packages import needed_for

with needed_for("ckptkit.torch"):
    from ckptkit.torch.exchange import GroupExchange
    from ckptkit.torch.report import LoadReport
    from ckptkit.torch.run import Run

if TYPE_CHECKING:
    from ckptkit.torch.dcp import DcpReader, DcpWriter

__all__ = ["DcpReader", "DcpWriter", "GroupExchange", "LoadReport", "Run"]


def __getattr__(name: str) -> object:
    if name not in ("DcpReader", "DcpWriter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptkit.torch import dcp

    return getattr(dcp, name)
