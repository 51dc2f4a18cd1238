"""Fallback: the newest step that can be restored, past those that are damaged; one of another model is refused.

Damaged steps that were passed over are set aside once an older one is restored, so that the run can save them again.
Only what was seen is: a step that another process set aside and saved again meanwhile is of another attempt, and stays.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from shlex import quote
from typing import NamedTuple, TypeVar

from ckptkit.format.keys import DAMAGED_ROOT_KEY, step_folder
from ckptkit.format.root import Root
from ckptkit.loading.exchange import Alone, Exchange, agreed
from ckptkit.loading.restore import restore
from ckptkit.loading.roots import attempt_seen
from ckptkit.model.tensor import Piece, TensorInfo
from ckptkit.runs.catalogue import no_step
from ckptkit.runs.run import Run
from threefold.cli import log
from threefold.errors import CheckFailed, UserError
from threefold.masking import masked

T = TypeVar("T")


class Candidate(NamedTuple):
    """A step of a run, and the attempt that its root named before it was tried.

    The attempt is "" if the root names none, and None if nobody looked, as of a run that is not to be changed.
    """

    url: str
    step: int
    attempt: str | None = None


def restore_newest(
    url: str, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None, strict: bool = False,
    exchange: Exchange | None = None, report: Callable[[str], None] = log, certify: bool = True,
    sets_aside: bool = True,
) -> Root:  # fmt: skip
    """Fill pieces from the newest committed step of a run, or from the newest before it that is not damaged.

    `report` is called for each step passed over, with a line that says which file, bytes and tensors are damaged. With
    `strict` a damaged newest step is an error. Raise CheckFailed if no step is sound, UserError if none is committed or
    the newest sound one does not fit. The steps that were passed over go into quarantine, unless `sets_aside` is False.
    The other arguments are those of `restore`.
    """
    together = exchange or Alone()
    say = report if together.rank == 0 else lambda line: None
    _, root, damaged = first_sound(
        committed_candidates([url], together),
        lambda each: restore(each.url, each.step, pieces, tensors=tensors, exchange=exchange, certify=certify),
        strict=strict,
        report=say,
    )
    if sets_aside and together.rank == 0:
        set_aside(damaged, report)
    return root


def first_sound(
    candidates: Iterable[Candidate], attempt: Callable[[Candidate], T], *, strict: bool, report: Callable[[str], None]
) -> tuple[Candidate, T, list[Candidate]]:
    """Return the first candidate that `attempt` takes without finding damage, what it returned, and the damaged ones.

    Candidates are tried in their order, newest first, and taken only as they are needed. With `strict` damage of the
    first one is raised.
    """
    rest = iter(candidates)
    candidate = next(rest, None)
    assert candidate is not None, "at least one"
    damaged: list[Candidate] = []
    while True:
        url, step = candidate.url, candidate.step
        try:
            return candidate, attempt(candidate), damaged
        except CheckFailed as damage:
            hint = f"ckptkit verify {quote(url)}/{step_folder(step)}"
            damaged.append(candidate)
            candidate = next(rest, None)
            if candidate is None:
                raise CheckFailed(damage.message, hint=damage.hint or hint) from damage
            other = f"step {candidate.step}" + (f" of {candidate.url}" if candidate.url != url else "")
            if strict:
                raise CheckFailed(f"{damage.message}; {other} is not tried: strict", hint=hint) from damage
            line = " ".join(damage.message.split())
            report(f"{line}; falling back from step {step} to {other}")


def set_aside(damaged: Iterable[Candidate], report: Callable[[str], None]) -> None:
    """Quarantine steps that were found damaged, and are still of the attempt that was.

    If that cannot be, as where nothing may be written, report it.
    """
    for url, step, attempt in damaged:
        where = f"step {step} of {masked(url)}"
        try:
            if Run(url).quarantine(step, attempt):
                report(f"{where} is set aside: its root is {DAMAGED_ROOT_KEY} now, and the step can be saved again")
        except (UserError, OSError) as error:
            report(f"warning: {where} is damaged and cannot be set aside: {error}")


def committed_candidates(
    urls: Sequence[str], exchange: Exchange, step: int | None = None, *, needed: bool = True
) -> Iterator[Candidate]:  # fmt: skip
    """Yield the committed steps of places of a run, newest first, of equal ones the first place's first.

    With a step only that one. The first rank looks, the others hear of each; UserError where one is `needed` and there
    is none.
    """
    found = map(identified, _committed(urls, step, needed=needed)) if exchange.rank == 0 else iter(())
    while candidate := json.loads(agreed(exchange, lambda: json.dumps(next(found, None)).encode())[0]):
        yield Candidate(*candidate)


def identified(candidate: Candidate) -> Candidate:
    """Return a candidate with the attempt that its root names now."""
    return candidate._replace(attempt=attempt_seen(Run(candidate.url).storage, candidate.step))


def _committed(urls: Sequence[str], only: int | None, *, needed: bool) -> Iterator[Candidate]:
    """Yield the same of one rank."""
    runs = [Run(url) for url in urls]
    if only is None:
        by_run = (map(partial(Candidate, run.storage.address), run.newest_first()) for run in runs)
        candidates = heapq.merge(*by_run, key=lambda candidate: -candidate.step)
    else:
        candidates = (Candidate(run.storage.address, only) for run in runs if run.is_committed(only))
    candidate = None
    for candidate in candidates:
        yield candidate
    if candidate is None and needed:
        raise no_step(runs[0].storage, runs[0].named if only is None else only)
