"""The schedules that `parallel.schedule` names, and a rank's row of one, ready for the executor.

GPipe (Huang and others 2019) runs all forward passes, then all backward passes. Evaluation runs the first half.

1F1B (Narayanan and others 2021) warms up, alternates and drains; it is interleaved if a rank holds several stages. Its
bubble is (p - 1) / (m + p - 1) of the step for p ranks and m micro-batches, as GPipe's. With v stages a rank a pass is
that much shorter, and so is what a rank waits for at either end: (p - 1) / (v m + p - 1), if m is at least p.

ZB-H1 (Qi and others 2023, arXiv 2401.10241) is 1F1B whose backward passes leave the gradients of weights for later. The
rank before waits for B alone. W fills what would be bubble at the end: rank r puts it off by r backward passes. So
every rank keeps as much as rank 0 of 1F1B: p micro-batches that wait for their B or their W. If F, B and W take as long
the bubble is a third of 1F1B's. Each stage's W come in order of micro-batches, one at a time, so sums of gradients
have the bits of the other schedules.

Stages are dealt in turn: of 2 ranks with 2 stages each, rank 0 holds stages 0 and 2. Micro-batches take turns in groups
of at least as many as there are ranks, so that the turn of a rank's next stage comes when the group's first is through
all ranks (Narayanan and others, whose groups are of exactly so many, which must divide the micro-batches).
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise

from threefold.errors import UserError
from trainer.pipeline.actions import Action, Schedule, stage_ranks
from trainer.pipeline.ahead import made_by, posted_ahead

Rows = list[list[Action]]


def gpipe(num_ranks: int, num_microbatches: int, virtual: int = 1) -> Rows:
    """Return the rows of all ranks, each with `virtual` stages; all micro-batches are live at once."""
    return _rows((num_ranks, num_microbatches, virtual), all_forward)


def forward_only(num_ranks: int, num_microbatches: int, virtual: int = 1) -> Rows:
    """Return the rows of all ranks without backward passes."""
    return [row[: len(row) // 2] for row in gpipe(num_ranks, num_microbatches, virtual)]


def one_f_one_b(num_ranks: int, num_microbatches: int, virtual: int = 1) -> Rows:
    """Return the rows of all ranks, each with `virtual` stages; at most `num_warmup + 1` passes are live.

    Rank 1 of 4 with 4 micro-batches runs F0 F1 F2 B0 F3 B1 B2 B3.
    """
    return _rows((num_ranks, num_microbatches, virtual), num_warmup)


def zb_h1(num_ranks: int, num_microbatches: int, virtual: int = 1) -> Rows:
    """Return the rows of all ranks, each with `virtual` stages.

    On rank r at most `num_warmup + 1 + r` passes are live, which is `num_ranks` with one stage each. Rank 1 of 2 with
    3 micro-batches runs F0 B0 F1 B1 W0 F2 B2 W1 W2.
    """
    return _rows((num_ranks, num_microbatches, virtual), num_warmup, has_w=True)


SCHEDULES: dict[str, Callable[[int, int, int], Rows]] = {"1f1b": one_f_one_b, "gpipe": gpipe, "zb-h1": zb_h1}


@lru_cache(maxsize=4)  # plans ask for those of all ranks
def all_actions(name: str, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of a schedule, with transfers; of forward passes alone for the name "forward"."""
    make = forward_only if name == "forward" else SCHEDULES[name]
    return tuple(map(tuple, with_transfers(make(num_ranks, num_microbatches, virtual))))


@cache
def rank_actions(name: str, num_ranks: int, num_microbatches: int, virtual: int, rank: int) -> tuple[Action, ...]:
    """Return a rank's row of them."""
    return all_actions(name, num_ranks, num_microbatches, virtual)[rank]


def all_forward(_rank: int, _num_ranks: int, num_microbatches: int, virtual: int) -> int:
    """Return how many forward passes a rank has."""
    return num_microbatches * virtual


def num_warmup(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> int:
    """Return how many forward passes come before the rank's first pair of a forward and a backward pass.

    With one stage a rank they fill the ranks after it. With more, those of the first group in all stages but the last
    come first, and what follows travels there and back: rank 0 of 4 with 2 stages each and 8 micro-batches has 4 + 6.
    """
    to_last = num_ranks - rank - 1
    largest = len(groups(num_ranks, num_microbatches)[0])
    wanted = to_last if virtual == 1 else (virtual - 1) * largest + 2 * to_last
    return min(wanted, num_microbatches * virtual)


def groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Return the micro-batches that take turns: as many groups as can be, whose sizes differ by one at most.

    11 micro-batches on 4 ranks are 0-5 and 6-10. Fewer micro-batches than ranks are one group.
    """
    num_groups = max(num_microbatches // num_ranks, 1)
    bounds = [-(-number * num_microbatches // num_groups) for number in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _rows(sizes: tuple[int, int, int], warmup: Callable[..., int], *, has_w: bool = False) -> Rows:
    """Return the rows of all ranks: so many forward passes first, then a forward and a backward pass in turn.

    Rank 0 of 2 with stages 0 and 2 and 4 micro-batches has F0 F1 of stage 0, F0 F1 of stage 2, then F2 F3 of each.
    Backward passes come in the same groups, the last stage first.
    """
    num_ranks, num_microbatches, virtual = sizes
    if min(sizes) < 1:
        text = f"no schedule for {num_ranks} ranks of {virtual} stages with {num_microbatches} micro-batches"
        raise UserError(text, hint="trainer schedule --pp 4 --microbatches 8")
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, virtual * num_ranks, num_ranks)
        passes = [(stage, m) for group in groups(num_ranks, num_microbatches) for stage in stages for m in group]
        forward = [Action("F", *each) for each in passes]
        backward = [Action("B", stages[0] + stages[-1] - stage, m) for stage, m in passes]
        rows.append(in_turn(forward, backward, warmup(rank, *sizes), rank if has_w else None))
    return rows


def in_turn(
    forward: Sequence[Action], backward: Sequence[Action], num_warmup: int, lag: int | None = None
) -> list[Action]:
    """Return `num_warmup` forward passes, then a forward and a backward pass in turn, then what is left.

    With a lag each backward pass has a W, which comes so many backward passes later.
    """
    row = list(forward[:num_warmup])
    for place, action in enumerate(backward):
        row += [*forward[num_warmup + place :][:1], action]
        if lag is not None and place >= lag:
            row.append(backward[place - lag]._replace(kind="W"))
    return row + [action._replace(kind="W") for action in (backward[-lag:] if lag else ())]


def with_transfers(schedule: Schedule, ahead: int | None = 0) -> list[list[Action]]:
    """Return a schedule with sends and receives; each receive is posted `ahead` passes before its tensor is read.

    With 1, rank 1 of 2 has RF0 RF1 F0 B0 SB0 F1 B1 SB1 of F0 B0 F1 B1, and `simulate(..., blocking=True)` finds rows
    that may stop. With None those come a pass ahead that cannot: `posted_ahead` says which. Runs take 0: on GPUs a
    receive is a kernel that takes a part of one until its tensor is there, and what that costs was not measured.
    A send comes right after the pass that made the tensor. Stages on one rank need none, and a W makes nothing that
    travels. Between two ranks the tensors of one direction have one order on both ends.
    """
    ranks = stage_ranks(schedule)
    early = posted_ahead(schedule) if ahead is None else set()
    widened = []
    for rank, row in enumerate(schedule):
        posted: list[list[Action]] = [[] for _ in row]  # before each pass
        for place, reader in enumerate(row):
            if ranks.get(made_by(reader).stage, rank) != rank:
                earlier = reader in early if ahead is None else ahead
                receive = Action("RF" if reader.kind == "F" else "RB", reader.stage, reader.microbatch)
                posted[max(place - earlier, 0)].append(receive)
        widened.append(
            [
                action
                for receives, maker in zip(posted, row, strict=True)
                for action in (*receives, maker, *_sends(maker, ranks))
            ]
        )
    return widened


def _sends(maker: Action, ranks: dict[int, int]) -> list[Action]:
    """Return the send of what a pass made, if another rank reads it."""
    after = maker.stage + {"F": 1, "B": -1}.get(maker.kind, 0)
    if after not in ranks or ranks[after] == ranks[maker.stage]:
        return []
    return [Action("SF" if maker.kind == "F" else "SB", maker.stage, maker.microbatch)]
