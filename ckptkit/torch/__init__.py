"""Checkpoints of any PyTorch program: modules, optimizers, DTensors, and what is not a tensor, by one call each way.

    with Run("runs/a") as run:
        run.save(100, {"model": model, "optimizer": optimizer, "rng": True}, metrics={"val_loss": 2.1})
        run.load({"model": model, "optimizer": optimizer, "rng": True})

This folder alone of ckptkit imports torch, beside functions of io/torch_tensors.py; `import ckptkit` leaves it out. All
ranks of a job call `save` and `load` together, with the same keys; without torch.distributed one process is all ranks.
DcpWriter and DcpReader are for programs that call torch.distributed.checkpoint, HfTrainerCallback and
LightningCheckpointIO for those trainers. They are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from threefold.packages import needed_for

with needed_for("ckptkit.torch"):
    from ckptkit.torch.exchange import GroupExchange
    from ckptkit.torch.run import Run
    from ckptkit.torch.state.agreement import LoadReport

if TYPE_CHECKING:
    from ckptkit.torch.trainers.dcp import DcpReader, DcpWriter
    from ckptkit.torch.trainers.hf_trainer import HfTrainerCallback
    from ckptkit.torch.trainers.lightning import LightningCheckpointIO

LAZY = {
    "DcpReader": "trainers.dcp",
    "DcpWriter": "trainers.dcp",
    "HfTrainerCallback": "trainers.hf_trainer",
    "LightningCheckpointIO": "trainers.lightning",
}
__all__ = [
    "DcpReader", "DcpWriter", "GroupExchange", "HfTrainerCallback", "LightningCheckpointIO", "LoadReport", "Run",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
