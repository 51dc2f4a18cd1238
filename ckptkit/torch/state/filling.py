"""Filling: a state of a PyTorch program from one open step, by all ranks together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.loading.exchange import Exchange, on_all
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import fill_from
from ckptkit.torch.state.agreement import LoadReport, compared
from ckptkit.torch.state.loading import Match
from ckptkit.torch.state.saved import Saved
from threefold.cli import log


def fill_state(
    state: Mapping[str, Any], reader: CheckpointReader, exchange: Exchange, *, strict: bool, certify: bool
) -> LoadReport:  # fmt: skip
    """Fill a state in place and report what was found; CheckFailed on all ranks where the step is damaged."""
    saved = on_all(exchange, lambda: Saved(reader, exchange.rank, exchange.size))
    match = on_all(exchange, lambda: Match(saved, state))
    for tie in on_all(exchange, lambda: saved.differing(match.ties)):
        match.untied.append("{} and {} are one tensor here and differ in the checkpoint".format(*tie.paths))
    report = compared(exchange, saved, match, strict=strict)
    sums = on_all(exchange, lambda: fill_from(reader, match.pieces, exchange if certify else None))
    num_certified = 0 if sums is None else sums.check(exchange, reader.url)
    on_all(exchange, match.finish)
    if report.ranks_without_rng and exchange.rank == 0:
        numbers = ", ".join(map(str, report.ranks_without_rng))
        step, run = reader.root.step, reader.files.storage.url
        log(f"warning: ranks {numbers} have no random state in step {step} of {run} and keep their own: "
            f"{saved.world_size} ranks saved it")  # fmt: skip
    return replace(report, num_certified=num_certified)
