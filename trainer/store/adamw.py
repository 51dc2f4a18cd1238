"""AdamW on the parts of parameters that a rank updates.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.config import OptimConfig


class Slice(NamedTuple):
    """Elements of one parameter with their gradient and state, all of the wide dtype."""

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decays: bool


@torch.no_grad()
def adamw_step(
    slices: Sequence[Slice], optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor
) -> None:
    """Make one step in place, after `step` steps, with the gradients scaled by `factor`; none where `is_bad` is 1.0.

    Both are numbers on the device, which decides: the host does not wait for them.
    """
    if not slices:
        return
    gradients = [each.gradient for each in slices]
    scale = None
    if gradients[0].is_cuda and gradients[0].dtype == torch.float32:
        scale = factor.reciprocal().float()  # the kernel divides by it, in the same pass
    else:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    for weight_decay, decays in ((optim.weight_decay, True), (0.0, False)):
        part = [each for each in slices if each.decays == decays]
        if not part:
            continue
        adamw(
            [each.master for each in part],
            [each.gradient for each in part],
            [each.exp_avg for each in part],
            [each.exp_avg_sq for each in part],
            [],
            list(torch.full((len(part),), float(step), device=part[0].master.device).unbind()),
            fused=True,
            grad_scale=scale,
            found_inf=is_bad,
            amsgrad=False,
            beta1=optim.beta1,
            beta2=optim.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=optim.eps,
            maximize=False,
        )
