"""Receives ahead: which may be posted a pass early, so that no ranks wait for each other whatever a GPU waits for.

NCCL receives in a kernel, which is done once its tensor came. Freeing memory or loading a kernel may wait for all
kernels of a GPU, so a pass behind a posted receive may have to wait for that tensor. Safe is an order of actions in
which no cycle of such waits is. If rank 0 of 2 runs F1 behind RB0, and rank 1 runs B0 behind RF1, then F1 waits for B0
and B0 for F1: one of the two receives has to come later. That of a gradient does.
"""

from itertools import pairwise

from trainer.pipeline.actions import Action, Schedule, stage_ranks


def made_by(reader: Action) -> Action:
    """Return the pass that makes what a pass reads; of a W itself."""
    return reader._replace(stage=reader.stage + {"F": -1, "B": 1}.get(reader.kind, 0))


def posted_ahead(schedule: Schedule) -> set[Action]:
    """Return the passes whose receive comes before the pass that precedes them on their rank.

    All that could are taken, and the ranks run their rows. If they stop, a cycle of waits is there, and one receive of
    it comes later, so that they go on. The order in which they ran proves that no cycle is left.

    F and B that take turns are left out where ranks have one stage and no W. What one reads was made just before: 1F1B
    over 2 ranks waits for two transfers a micro-batch either way, and a kernel that waits takes a part of the GPU.
    """
    ranks = stage_ranks(schedule)
    takes_turns = len(ranks) == len(schedule) and not any(action.kind == "W" for row in schedule for action in row)
    sources = {  # what other ranks make, by the pass that reads it
        reader: made_by(reader)
        for rank, row in enumerate(schedule)
        for reader in row
        if ranks.get(made_by(reader).stage, rank) != rank
    }
    early = {
        reader
        for row in schedule
        for before, reader in pairwise(row)
        if reader in sources and not (takes_turns and before.kind != reader.kind)
    }
    places, done = [0] * len(schedule), set[Action]()
    while unfinished := [rank for rank, row in enumerate(schedule) if places[rank] < len(row)]:
        num_done = len(done)
        waiting: dict[int, Action] = {}  # by rank, the pass whose tensor it waits for
        for rank in unfinished:
            row = schedule[rank]
            while places[rank] < len(row) and rank not in waiting:
                action, *following = row[places[rank] : places[rank] + 2]
                reads = [action, *early.intersection(following)]
                missing = [reader for reader in reads if reader in sources and sources[reader] not in done]
                if missing:
                    waiting[rank] = missing[0]
                else:
                    done.add(action)
                    places[rank] += 1
        if len(done) == num_done:
            path = unfinished[:1]
            while (maker := ranks[sources[waiting[path[-1]]].stage]) not in path:
                path.append(maker)
            later = early.intersection(waiting[rank] for rank in path[path.index(maker) :])
            if not later:  # the schedule itself cannot run
                return early
            early.remove(min(later))  # a B if there is one
    return early
