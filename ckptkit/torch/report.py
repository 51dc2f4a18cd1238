"""LoadReport: what a load found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.runs.fallback import Candidate


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
