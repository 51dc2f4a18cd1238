"""Fallback: the newest step that can be restored, past those that are damaged; one of another model is refused."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptkit.address import open_address
from ckptkit.chunk import Piece
from ckptkit.format.root import Root, step_folder
from ckptkit.loading.exchange import Alone, Exchange, agreed
from ckptkit.loading.restore import restore
from ckptkit.runs.catalogue import committed_steps
from ckptkit.tensor import TensorInfo
from threefold.cli import log
from threefold.errors import CheckFailed, UserError

Candidate = tuple[str, int]  # run URL and step
T = TypeVar("T")


def restore_newest(
    url: str, pieces: Sequence[Piece], *, tensors: Sequence[TensorInfo] | None = None, strict: bool = False,
    exchange: Exchange | None = None, report: Callable[[str], None] = log,
) -> Root:  # fmt: skip
    """Fill pieces from the newest committed step of a run, or from the newest before it that is not damaged.

    `report` is told, in a line for each step passed over, which file, bytes and tensors are damaged; with `strict` a
    damaged newest step is an error. CheckFailed where no step is sound, UserError where none is committed or the
    newest sound one does not fit. The other arguments are those of `restore`.
    """
    together = exchange or Alone()
    candidates: list[Candidate] = [
        (run, step) for run, step in json.loads(agreed(together, lambda: _candidates(url, together))[0])
    ]
    if not candidates:
        raise UserError(f"{url} holds no committed step", hint=f"check the URL: ckptkit ls {url}")
    say = report if together.rank == 0 else lambda line: None
    _, root = first_sound(
        candidates,
        lambda candidate: restore(*candidate, pieces, tensors=tensors, exchange=exchange),
        strict=strict,
        report=say,
    )
    return root


def first_sound(
    candidates: Sequence[Candidate], attempt: Callable[[Candidate], T], *, strict: bool, report: Callable[[str], None]
) -> tuple[Candidate, T]:
    """The first candidate that `attempt` takes without finding damage, and what it gave.

    Candidates are tried in their order, newest first. With `strict` damage of the first one is raised.
    """
    assert candidates, "at least one"
    for number, (url, step) in enumerate(candidates):
        try:
            return (url, step), attempt((url, step))
        except CheckFailed as damage:
            hint = f"ckptkit verify {url}/{step_folder(step)}"
            if number + 1 == len(candidates):
                raise CheckFailed(damage.message, hint=hint) from damage
            next_url, next_step = candidates[number + 1]
            other = f"step {next_step}" + (f" of {next_url}" if next_url != url else "")
            if strict:
                raise CheckFailed(f"{damage.message}; {other} is not tried: strict", hint=hint) from damage
            line = " ".join(damage.message.split())
            report(f"{line}; falling back from step {step} to {other}")
    raise AssertionError("the last candidate is taken or refused")


def _candidates(url: str, exchange: Exchange) -> bytes:
    """The committed steps that an address means, newest first, as JSON; only the first rank looks."""
    if exchange.rank:
        return b""
    storage, named = open_address(url)
    steps = [step for step in reversed(committed_steps(storage)) if named in (None, step)]
    return json.dumps([(storage.url, step) for step in steps]).encode()
