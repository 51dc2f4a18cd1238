"""Rewind: a run goes on from an older step of its own, and its newer steps are set aside.

`--load RUN/step-000000100 --rewind` asks for it, where RUN is one of the places that the run saves to. It happens once:
if the newest step was saved by a start with the same `--load`, the same command resumes that one.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from ckptkit import Run, Tiers, open_source
from threefold.errors import CheckFailed, UserError, quoted
from threefold.masking import masked
from trainer.config import CheckpointConfig
from trainer.config.resolve import shared_urls


def rewind_target(config: CheckpointConfig, tiers: Tiers | None) -> tuple[str, int] | None:
    """Return the URL and the step of the run itself to go back to, None for a usual start; changes nothing.

    UserError if newer steps are there and no rewind is asked for, if one of them is pinned, or if `--load` does not
    name a step of the run.
    """
    named = own_step(config.load, tiers)
    if tiers is None or named is None:
        if config.rewind:
            place = tiers.first.url if tiers else "RUN"
            raise UserError(
                f"--rewind goes back to a step of the run that is saved to, which --load {masked(config.load)} is not",
                hint=f"--load {quoted(masked(place))}/step-000000100 --rewind",
            )
        return None
    url, step = named
    newer = [each for each in (Run(each).newest() or 0 for each in shared_urls(tiers)) if each > step]
    if newer and was_saved_since(config, tiers, step):
        return None
    if not config.rewind:
        if newer:
            raise UserError(
                f"--load names step {step} of the run that is saved to, whose newest step is {max(newer)}",
                hint=f"to go on from step {step} and set newer ones aside: --rewind; else leave --load out",
            )
        return None
    if tiers.first.of_node:
        raise UserError(
            f"--rewind needs a first tier that all nodes share, {tiers.first.url} is each node's own",
            hint=f"--save {quoted(masked(url))} --load {quoted(masked(config.load))} --rewind",
        )
    Run(config.load).resolve()
    for each in shared_urls(tiers):
        Run(each).set_aside_after(step, dry_run=True)
    return named


def rewind(tiers: Tiers, step: int) -> str:
    """Set all steps after one aside, wherever the run keeps steps; return what is to be said of it."""
    said = []
    for url in reversed(shared_urls(tiers)):
        report = Run(url).set_aside_after(step)
        if gone := sorted(report.set_aside + report.quarantined):
            said.append(f"{len(gone)} newer steps of {masked(url)} are set aside, {gone[0]} to {gone[-1]}")
    return f"goes back to step {step}: {'; '.join(said) or 'no newer step is there'}"


def own_step(load: str, tiers: Tiers | None) -> tuple[str, int] | None:
    """Return the tier, by its URL, and the step of it that `--load` names; None if it names something else."""
    source = open_source(load) if load and tiers is not None else None
    if tiers is None or not isinstance(source, Run) or source.named is None:
        return None
    same = [url for url in shared_urls(tiers) if Run(url).storage.address == source.storage.address]
    return (same[0], source.named) if same else None


def was_saved_since(config: CheckpointConfig, tiers: Tiers, step: int) -> bool:
    """Return whether the newest step after one was saved by a start that had come from that one by the same `--load`.

    Of each tier the newest step whose root can be read counts.
    """
    found = [each for each in (next(_readable(Run(url), step), None) for url in shared_urls(tiers)) if each]
    if not found:
        return False
    _, metadata = max(found, key=lambda each: each[0])
    saved = metadata.get("config", {}).get("checkpoint", {})
    return saved.get("load") == masked(config.load) and (saved.get("rewind", False) or not config.rewind)


def _readable(run: Run, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the steps of a run after one, newest first, with their metadata; damaged ones are left out."""
    for newer in itertools.takewhile(lambda each: each > step, run.newest_first()):
        with contextlib.suppress(CheckFailed):
            yield newer, dict(run.root(newer).metadata)
