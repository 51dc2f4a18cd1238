"""In how many parts tokens travel to the experts of other ranks: as configured, as a run recorded, or the fastest.

Tokens of a part travel beside the products of the part before, and their sums beside those of the next. But products of
fewer rows are slower, and gradients of weights are read and written once a part. So forward and backward of one layer
are timed, with tokens that go to all experts alike.
"""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from trainer.config import Config
from trainer.config.resolve import cuts_tokens, longest_row
from trainer.linear.grouped import GroupedGemm
from trainer.linear.weight import Weight
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.ops.timing import slowest_seconds
from trainer.parallel.expert import ExpertParallel
from trainer.parallel.rows import RowLimit
from trainer.parallel.tensor import TensorParallel

NAME, TIMED = "expert-parts", (1, 2, 4)  # under which a run records the number; which numbers are timed


def choose_expert_parts(
    config: Config,
    mesh: ProcessMesh,
    dtype: torch.dtype,
    recorded: Mapping[str, str],
    form: str,
    kernel: str | None,
    *,
    by_timing: bool,
) -> int | None:
    """Return the number of parts, on all ranks the same; None if no tokens travel.

    It is 1 unless the configuration or `recorded` says another, or it is chosen `by_timing` on GPUs with ops of rows in
    a `form` and a `kernel` of gradients. All ranks call it.
    """
    parallel = config.parallel
    if mesh.ep.size == 1:
        return None
    known = recorded.get(NAME, "")
    if number := parallel.moe_overlap_parts or (int(known) if known.isdecimal() else 0):
        return number
    if not by_timing or mesh.device.type != "cuda":
        return 1
    slowest = slowest_seconds(_Layer(config, mesh, dtype, form, kernel).passes, TIMED, mesh)
    return TIMED[slowest.index(min(slowest))]


class _Layer:
    """The experts of a layer, with weights and tokens of a rank whose values do not matter."""

    def __init__(self, config: Config, mesh: ProcessMesh, dtype: torch.dtype, form: str, kernel: str | None) -> None:
        model, parallel, device = config.model, config.parallel, mesh.device
        tensor = TensorParallel(mesh.tp, cuts_tokens(config))
        limit = RowLimit(parallel.moe_rows, device)
        limit.begin_step(0)
        borrows_tp = mesh.layout.etp is not None
        experts = ExpertParallel.of(tensor, mesh.ep, limit, parallel.moe_dispatch, borrows_tp=borrows_tp)
        self.experts, self.num_experts, self.k = experts.in_form(form), model.num_experts, model.experts_per_token
        num_here = model.num_experts // mesh.ep.size
        ffn_size = model.expert_ffn_hidden_size // (1 if borrows_tp else mesh.tp.size)

        def weight(name: str, *shape: int) -> Weight:
            values = torch.zeros(shape, dtype=dtype, device=device)
            return Weight(name, values, torch.zeros(shape, dtype=wide_dtype(dtype), device=device), contributes=True)

        self.up = GroupedGemm(weight("up", 2 * num_here, ffn_size, model.hidden_size), 2, lambda: kernel)
        self.down = GroupedGemm(weight("down", num_here, model.hidden_size, ffn_size), kernel=lambda: kernel)
        num_tokens = config.train.micro_batch_size * longest_row(config) // mesh.cp.size
        num_tokens //= mesh.tp.size if tensor.cuts_tokens else 1
        routes = torch.arange(num_tokens * self.k, device=device)
        self.experts_TK = (routes % self.num_experts).view(num_tokens, self.k)
        self.weights_TK = torch.ones(num_tokens, self.k, dtype=wide_dtype(dtype), device=device, requires_grad=True)
        self.x_TD = torch.ones(num_tokens, model.hidden_size, dtype=dtype, device=device, requires_grad=True)

    def passes(self, num_parts: int) -> Tensor:
        """Return the output of a forward whose backward ran, too."""
        experts = self.experts
        coming, routes = (
            experts.begin(self.x_TD, num_parts),
            experts.routes(self.experts_TK, self.num_experts, num_parts),
        )
        packed = experts.widen(self.x_TD, coming, self.up, routes, self.k)
        y_TD = experts.narrow(packed, self.weights_TK, self.down, [*chain(*routes)])
        y_TD.backward(self.x_TD.detach())
        return y_TD
