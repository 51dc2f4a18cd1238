"""GPipe (Huang and others 2019): all forward passes, then all backward passes. Evaluation runs the first half."""

from trainer.pipeline.actions import PASSES, Action, check_sizes


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of all ranks, a stage each; all micro-batches are live at once."""
    check_sizes(num_stages, num_microbatches)
    return [[Action(kind, stage, m) for kind in PASSES for m in range(num_microbatches)] for stage in range(num_stages)]


def forward_only(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of all ranks without backward passes."""
    return [row[:num_microbatches] for row in gpipe(num_stages, num_microbatches)]
