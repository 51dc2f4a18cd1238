"""Late copies: which tensors of a state may be copied beside the program's next work, and whether they changed.

Late is what an optimizer of the state owns: its parameters, and its states of them. It changes in the optimizer's step,
which waits for the copies. An optimizer with `train` and `eval` swaps weights outside its step, so nothing of it is
late. Any other write in place raises the version counter that torch keeps of a tensor, and so is seen at the end of the
copies. Writes through `.data` and from numpy raise none.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ckptkit.torch.state.boxes import is_dtensor


class LateTensors:
    """Tensors by the names that they are saved under, with their version counters when the save began."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._counted = [(name, tensor, version_of(tensor)) for name, tensor in tensors.items()]

    def change(self) -> str:
        """Return what was written to since the save began, "" for nothing; any thread may ask."""
        changed = [name for name, tensor, version in self._counted if version_of(tensor) != version]
        if not changed:
            return ""
        others = f" and {len(changed) - 1} more" if changed[1:] else ""
        return (
            f"{changed[0]}{others} changed while overlap=True copied it; "
            "call run.wait_until_copied() before the change, or save without overlap"
        )


def version_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the version counters of a tensor, of a DTensor also its local one's; None if torch keeps none."""
    if tensor.is_inference():
        return None
    counted: Any = tensor
    return (counted._version, counted._local_tensor._version) if is_dtensor(tensor) else (counted._version,)


def owned_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that change in steps of these optimizers alone."""
    late, swapped = set[int](), set[int]()
    for optimizer in optimizers:
        ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
        (swapped if swaps_weights(optimizer) else late).update(ids)
    return late - swapped


def swaps_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a mode of training and one of evaluation, as schedule-free ones do."""
    return any(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
