"""Agreement: what all ranks of a load have to ask for, find in the checkpoint, and fill a state from, together."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from ckptkit.format.keys import check_step
from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import fill_from
from ckptkit.runs.fallback import Candidate
from ckptkit.torch.state.capture import check_keys
from ckptkit.torch.state.loading import OTHER_KIND, Match
from ckptkit.torch.state.saved import SavedKeys
from threefold.cli import log
from threefold.errors import UserError, listed

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The step that was loaded, what was saved as its metrics, and what did not match.

    `missing` names what the program has and the checkpoint lacks, which keeps its values; `unexpected` what the
    checkpoint has under the same keys and no rank asked for. All of these are empty of a strict load.
    `untied` are pairs that share memory in the program and differ in the checkpoint: they got the values of the first.
    `num_certified` tensors were loaded whole, by all ranks together, and are equal to what was saved.
    `keys` are those of the state that was saved, also the ones that were not loaded.
    `ranks_without_rng` are those that had no random state in the checkpoint and keep their own.
    `damaged` are the steps that were passed over, as `ckptkit.set_aside` takes them.
    """

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ranks_without_rng: tuple[int, ...] = ()
    num_certified: int = 0
    untied: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    damaged: tuple[Candidate, ...] = ()


def agree_on_load(exchange: Exchange, state: State, asked: dict[str, Any]) -> None:
    """Raise UserError on all ranks if one asks for what no load can do, or for another load than the others."""

    def message() -> bytes:
        check_keys(state)
        if asked["step"] is not None:
            check_step(asked["step"])
        return json.dumps({**asked, "strict": bool(asked["strict"]), "certify": bool(asked["certify"])}).encode()

    heard = [json.loads(each) for each in agreed(exchange, message)]
    for name in asked:
        found = list(dict.fromkeys(each[name] for each in heard))
        if len(found) > 1:
            raise UserError(
                f"ranks load with different values of {name}: {', '.join(map(str, found))}",
                hint="let all ranks call load with the same arguments",
            )


def compared(exchange: Exchange, saved: SavedKeys, match: Match, *, strict: bool) -> LoadReport:
    """Return what all ranks together found; the same UserError on all if it is not to be loaded."""
    mine: dict[str, Any] = {
        "missing": match.missing, "faults": match.faults, "wanted": sorted(match.wanted),
        "available": sorted(match.available), "held_back": match.held_back, "lacks_rng": match.lacks_rng,
        "untied": match.untied,
    }  # fmt: skip
    heard = [mine] if exchange.size == 1 else _of_all(exchange, mine)

    def union(name: str) -> dict[str, None]:
        return dict.fromkeys(item for each in heard for item in each[name])

    wanted = union("wanted")
    missing = tuple(union("missing"))
    unexpected = tuple(name for name in union("available") if name not in wanted)
    faults = [*union("faults")]
    if strict:
        faults = [
            *(f"missing in the checkpoint: {name}" for name in missing),
            *(f"not in the program: {name}" for name in unexpected),
            *faults, *union("held_back"), *union("untied"),
        ]  # fmt: skip
    if faults:
        held_back = union("held_back")
        only_loose = strict and not union("faults")
        hint = "strict=False loads the rest and reports these" if only_loose else f"ckptkit inspect {quote(saved.url)}"
        if only_loose and any(name.partition("/")[0] not in saved.keys for name in missing):
            hint = f"its keys are {', '.join(saved.keys)}; {hint}"
        if any(fault.endswith(OTHER_KIND) for fault in faults):
            hint = 'make the optimizer that was saved, or leave its key out: run.load({"model": model})'
        if held_back and only_loose and not missing and not unexpected:
            hint = "leave the key out; with strict=False each rank takes that of its number, others the first's"
        if union("untied") and only_loose and not (missing or unexpected or held_back):
            hint = "give each a parameter of its own in the program; with strict=False the first is loaded into both"
        raise UserError(f"{saved.url} does not fit what is loaded from it:{listed(faults)}", hint=hint)
    lacking = tuple(rank for rank, each in enumerate(heard) if each["lacks_rng"])
    return LoadReport(
        saved.root.step, saved.metrics, missing, unexpected, lacking, untied=tuple(union("untied")),
        keys=tuple(saved.keys),
    )  # fmt: skip


def _of_all(exchange: Exchange, own: dict[str, Any]) -> list[dict[str, Any]]:
    packed = zlib.compress(json.dumps(own).encode(), 1)
    return [json.loads(zlib.decompress(each)) for each in agreed(exchange, lambda: packed)]


def fill_state(
    state: Mapping[str, Any], reader: CheckpointReader, exchange: Exchange, *, strict: bool, certify: bool
) -> LoadReport:  # fmt: skip
    """Fill a state in place and report what was found; CheckFailed on all ranks where the step is damaged."""
    saved = on_all(exchange, lambda: SavedKeys(reader, exchange.rank, exchange.size))
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
