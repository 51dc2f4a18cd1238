"""In how many parts cut tokens travel between the ranks of tp: as configured, as a run recorded, or the fastest.

Each part travels beside the products of another. But products of fewer rows are slower, and more of them take the host
longer to enqueue, so that small micro-batches lose by it. So forward and backward of one layer's cut linears are timed,
on as many tokens as the run's micro-batches have. More parts are taken only for a gain above the noise.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from trainer.config import Config
from trainer.config.eight_bits import linears_of
from trainer.config.resolve import cuts_tokens, longest_row
from trainer.linear.weight import Weight
from trainer.mesh.mesh import ProcessMesh
from trainer.ops.dtypes import wide_dtype
from trainer.ops.timing import median_seconds, slowest_seconds
from trainer.parallel.tensor import TensorParallel

NAME, TIMED = "token-parts", (1, 2, 4)  # under which a run records the number; which numbers are timed
GAIN = 0.02  # by which share of the time more parts must be faster


def choose_token_parts(
    config: Config, mesh: ProcessMesh, dtype: torch.dtype, recorded: Mapping[str, str], *, by_timing: bool
) -> int | None:
    """Return the number of parts, on all ranks the same; None if no tokens are cut.

    It is 1 unless the configuration or `recorded` says another, or it is chosen `by_timing` on GPUs. Products in eight
    bits are of all rows at once. All ranks call it.
    """
    if not cuts_tokens(config):
        return None
    if config.fp8.recipe != "off":
        return 1
    known = recorded.get(NAME, "")
    if number := config.parallel.tp_overlap_parts or (int(known) if known.isdecimal() else 0):
        return number
    return fastest_parts(config, mesh, dtype) if by_timing and mesh.device.type == "cuda" else 1


def fastest_parts(
    config: Config,
    mesh: ProcessMesh,
    dtype: torch.dtype,
    seconds_of: Callable[[Callable[[], object]], float] = median_seconds,
) -> int:
    """Return which of the timed numbers the slowest rank is fastest with; all ranks call it."""
    return fewest_that_win(slowest_seconds(_CutLinears(config, mesh, dtype).passes, TIMED, mesh, seconds_of))


def fewest_that_win(seconds: Sequence[float]) -> int:
    """Return the number to take, from the seconds of each of TIMED.

    For example 100, 99 and 97 ms of 1, 2 and 4 parts: 2 gain less than they must over 1, so it is 4.
    """
    taken, least = TIMED[0], seconds[0]
    for number, each_s in zip(TIMED[1:], seconds[1:], strict=True):
        if each_s <= least * (1 - GAIN):
            taken, least = number, each_s
    return taken


class _CutLinears:
    """The cut linears of the last layer, with weights and tokens of a rank whose values do not matter."""

    def __init__(self, config: Config, mesh: ProcessMesh, dtype: torch.dtype) -> None:
        self._num_parts, device = 1, mesh.device
        self.tensor = TensorParallel(mesh.tp, cuts_tokens=True, num_parts=lambda: self._num_parts)
        num_rows = config.train.micro_batch_size * longest_row(config) // mesh.cp.size
        self.columns, self.rows = list[tuple[torch.Tensor, Weight]](), list[tuple[torch.Tensor, Weight]]()
        for place, group in enumerate(linears_of(config, config.model.num_layers - 1)):
            is_column = place % 2 == 0  # q, k and v are one matrix, as are gate and up: a row-cut one comes after each
            shape = sum(linear.own[0] for linear in group), group[0].own[1]
            values = torch.zeros(shape, dtype=dtype, device=device)
            gradient = torch.zeros(shape, dtype=wide_dtype(dtype), device=device)
            own = num_rows // mesh.tp.size if is_column else num_rows
            x = torch.ones(own, shape[1], dtype=dtype, device=device, requires_grad=True)
            weight = Weight(group[0].name, values, gradient, contributes=True)
            (self.columns if is_column else self.rows).append((x, weight))

    def passes(self, num_parts: int) -> list[torch.Size]:
        """Run forward and backward of each linear, and return the shapes of what they return."""
        self._num_parts, shapes = num_parts, []
        for x_TD, weight in self.columns:
            y_SN = self.tensor.column_linear(x_TD, [(weight, None)])
            torch.autograd.grad(y_SN, x_TD, y_SN.detach())
            shapes.append(y_SN.shape)
        for x_SK, weight in self.rows:
            y_TD = self.tensor.row_linear(x_SK, weight, None)
            torch.autograd.grad(y_TD, x_SK, y_TD.detach())
            shapes.append(y_TD.shape)
        return shapes
