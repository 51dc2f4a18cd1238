"""Fallback: the newest step that can be restored, past those that are damaged; one of another model is refused."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from shlex import quote
from typing import TypeVar

from ckptkit.format.keys import step_folder
from ckptkit.format.root import Root
from ckptkit.loading.exchange import Alone, Exchange, agreed
from ckptkit.loading.restore import restore
from ckptkit.model.box import Piece
from ckptkit.model.tensor import TensorInfo
from ckptkit.runs.catalogue import no_step
from ckptkit.runs.run import Run
from threefold.cli import log
from threefold.errors import CheckFailed

Candidate = tuple[str, int]  # run URL and step
T = TypeVar("T")


def restore_newest(
    url: str, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None, strict: bool = False,
    exchange: Exchange | None = None, report: Callable[[str], None] = log, certify: bool = True,
) -> Root:  # fmt: skip
    """Fill pieces from the newest committed step of a run, or from the newest before it that is not damaged.

    `report` is called for each step passed over, with a line that says which file, bytes and tensors are damaged. With
    `strict` a damaged newest step is an error. Raise CheckFailed if no step is sound, UserError if none is committed or
    the newest sound one does not fit. The other arguments are those of `restore`.
    """
    together = exchange or Alone()
    say = report if together.rank == 0 else lambda line: None
    _, root = first_sound(
        committed_candidates(url, together),
        lambda candidate: restore(*candidate, pieces, tensors=tensors, exchange=exchange, certify=certify),
        strict=strict,
        report=say,
    )
    return root


def first_sound(
    candidates: Iterable[Candidate], attempt: Callable[[Candidate], T], *, strict: bool, report: Callable[[str], None]
) -> tuple[Candidate, T]:
    """Return the first candidate that `attempt` takes without finding damage, and what it returned.

    Candidates are tried in their order, newest first, and taken only as they are needed. With `strict` damage of the
    first one is raised.
    """
    found = iter(candidates)
    candidate = next(found, None)
    assert candidate is not None, "at least one"
    while True:
        url, step = candidate
        try:
            return candidate, attempt(candidate)
        except CheckFailed as damage:
            hint = f"ckptkit verify {quote(url)}/{step_folder(step)}"
            candidate = next(found, None)
            if candidate is None:
                raise CheckFailed(damage.message, hint=hint) from damage
            other = f"step {candidate[1]}" + (f" of {candidate[0]}" if candidate[0] != url else "")
            if strict:
                raise CheckFailed(f"{damage.message}; {other} is not tried: strict", hint=hint) from damage
            line = " ".join(damage.message.split())
            report(f"{line}; falling back from step {step} to {other}")


def committed_candidates(url: str, exchange: Exchange) -> Iterator[Candidate]:
    """Yield the committed steps that an address means, newest first; the first rank looks, the others hear of each."""
    found = _committed(url) if exchange.rank == 0 else iter(())
    while step := json.loads(agreed(exchange, lambda: json.dumps(next(found, None)).encode())[0]):
        yield step[0], step[1]


def _committed(url: str) -> Iterator[Candidate]:
    """Yield the same of one rank; UserError where there is none."""
    run, step = Run(url), None
    for step in run.newest_first():
        yield run.storage.address, step
    if step is None:
        raise no_step(run.storage, run.named)
