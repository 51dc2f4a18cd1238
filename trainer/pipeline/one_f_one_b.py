"""1F1B (PipeDream-flush; Narayanan and others 2021): warm up, alternate, drain."""

from trainer.pipeline.actions import Action, check_sizes


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of all ranks, a stage each; at most `num_stages - stage` micro-batches are live.

    Stage 1 of 4 with 4 micro-batches runs F0 F1 F2 B0 F3 B1 B2 B3.
    """
    check_sizes(num_stages, num_microbatches)
    return [_row(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _row(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    row = [Action("F", stage, m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        row += [Action("F", stage, m + num_warmup), Action("B", stage, m)]
    return row + [Action("B", stage, m) for m in range(num_microbatches - num_warmup, num_microbatches)]
