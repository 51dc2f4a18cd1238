"""GPipe (Huang and others 2019): all forward passes, then all backward passes. Evaluation runs the first half."""

from trainer.pipeline.actions import Action, check_sizes
from trainer.pipeline.order import backward_passes, forward_passes


def gpipe(num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """Return the rows of all ranks, each with `virtual` stages; all micro-batches are live at once."""
    sizes = num_ranks, num_microbatches, virtual
    check_sizes(*sizes)
    return [forward_passes(rank, *sizes) + backward_passes(rank, *sizes) for rank in range(num_ranks)]


def forward_only(num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """Return the rows of all ranks without backward passes."""
    return [row[: len(row) // 2] for row in gpipe(num_ranks, num_microbatches, virtual)]
