"""Run: a run that any PyTorch program saves to and loads from."""

import json
import math
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Real
from shlex import quote
from typing import Any

import torch

from ckptkit.format.keys import check_step, step_folder
from ckptkit.format.state_tree import METADATA
from ckptkit.handoff.report import SaveReport
from ckptkit.loading.exchange import Alone, Exchange, agreed, on_all
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import fill_from
from ckptkit.model.box import Piece
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.fallback import committed_candidates, first_sound
from ckptkit.runs.run import Run as AnyRun
from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.saving.options import CheckpointerOptions
from ckptkit.torch.capture import check_keys
from ckptkit.torch.exchange import GroupExchange, open_exchange
from ckptkit.torch.late import LateTensors, swaps_weights
from ckptkit.torch.loading import OTHER_KIND, Match
from ckptkit.torch.objects import optimizers_in
from ckptkit.torch.report import LoadReport
from ckptkit.torch.saved import Saved
from ckptkit.torch.saving import SavePlanner
from threefold.cli import log
from threefold.closing import Closing
from threefold.errors import StorageError, UserError, listed

State = Mapping[str, Any]
DEFAULTS = CheckpointerOptions()


class Run(AnyRun, Closing):
    """A run at a URL, with `save`, `load`, `wait` and `close` for the state of a PyTorch program.

    A state is a dict by names of modules, optimizers, objects with state_dict and load_state_dict, tensors, DTensors,
    and of numbers, strings, bytes, arrays, lists and dicts of these; `"rng": True` is the random state of each rank.
    All ranks of torch.distributed call `save` and `load` together, in one order and with one step. Use it in a `with`,
    or close it: that waits for the last save. The thread that made it calls its methods. With an `exchange` its ranks
    are all that there are.
    """

    def __init__(
        self, url: Any, options: CheckpointerOptions = DEFAULTS, *, exchange: Exchange | None = None
    ) -> None:  # fmt: skip
        super().__init__(url)
        if not isinstance(options, CheckpointerOptions):
            text = f"options of a run are CheckpointerOptions, not {type(options).__name__}"
            raise UserError(text, hint=f"Run({self.url!r}, ckptkit.CheckpointerOptions())")
        if exchange is not None and not hasattr(exchange, "all_gather"):
            raise UserError(f"an exchange has all_gather, {type(exchange).__name__} has not", hint="leave it out")
        self._options = options
        self._exchange = exchange
        self._planner: SavePlanner | None = None
        self._checkpointer: Checkpointer | None = None
        self._ended: list[SaveReport] = []  # that `wait` is to return
        self._hooks: dict[int, Any] = {}

    def save(
        self, step: int, state: State, metrics: Mapping[str, float] | None = None, *, overlap: bool = False
    ) -> float:
        """Copy this rank's state, which the writer process then saves as a step; return the seconds until it is copied.

        `metrics` are recorded in the root, where `ckptkit ls`, `best` and retention find them; the first rank's count.
        With `overlap` parameters and states of the optimizers in the state are copied beside the next forward and
        backward, and these optimizers wait for that before their next step; if one of them changes before, the save
        fails and names it. All else is copied at once. Raise UserError for what no checkpoint can hold, StorageError
        after `max_failed_saves` failures in a row; another failure is logged, and raised by `wait`.
        """
        exchange = self._opened_exchange()
        if self._planner is None:
            self._planner = SavePlanner(exchange)
        self.wait_until_copied()
        recorded: dict[str, Any] = {}

        def check() -> None:
            self._check(step, state, overlap=overlap)
            recorded.update(_recorded(metrics or {}))

        plan = self._planner.plan(step, state, secrets.token_hex(8), check)
        checkpointer = self._opened_checkpointer(exchange, plan.token)
        pieces, late = plan.pieces, LateTensors(plan.late if overlap else {})
        if overlap:
            pieces = [piece if piece.name in plan.late else _copied(piece) for piece in pieces]
            self._hook(each for each in optimizers_in(state) if not swaps_weights(each))
        seconds = checkpointer.save(
            step, pieces, tensors=plan.table, layout=ParallelLayout(dp=exchange.size), num_layers=1,
            metadata={**recorded, **plan.metadata}, overlap=overlap, change=late.change,
        )  # fmt: skip
        self._keep(checkpointer.poll())
        return seconds

    def load(self, state: State, step: int | None = None, *, strict: bool = True, certify: bool = True) -> LoadReport:
        """Fill a state in place from a committed step, by default the newest that is sound, and report what was found.

        A save of this Run that still runs is waited for first.
        Keys of the checkpoint that `state` leaves out are left alone. Raise UserError, before anything is changed, with
        all names that are missing, unexpected or of another shape or dtype; with strict=False the first two are in the
        report alone. Optimizers get the states that they do not have yet. `certify` has tensors that all ranks together
        load whole compared with the certificate of the save; CheckFailed names those that are not equal to it.
        """
        exchange = self._opened_exchange()
        if self._checkpointer is not None:
            self._keep(self._checkpointer.wait())
        _agree_on_load(exchange, state, {"step": step, "strict": strict, "certify": certify})
        candidates: Iterable[tuple[str, int]] = (
            committed_candidates(self._address(), exchange) if step is None else [(self.url, step)]
        )
        say = log if exchange.rank == 0 else lambda line: None
        _, report = first_sound(
            candidates,
            lambda candidate: self._load(state, candidate[1], exchange, strict=strict, certify=certify),
            strict=False,
            report=say,
        )
        return report

    def wait_until_copied(self) -> float:
        """Wait until the copies of a save with `overlap` are made; return the seconds that took."""
        return self._checkpointer.join() if self._checkpointer is not None else 0.0

    def wait(self) -> list[SaveReport]:
        """Wait until no save runs; return how the saves since the last call ended, StorageError if one failed."""
        reports, self._ended = self._ended, []
        return _sound([*reports, *(self._checkpointer.wait() if self._checkpointer is not None else ())])

    def close(self) -> None:
        """Wait for the running save and end the writer process; StorageError if a save failed that was not reported."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        checkpointer, self._checkpointer = self._checkpointer, None
        reports, self._ended = self._ended, []
        reports += checkpointer.close() if checkpointer is not None else []
        if isinstance(self._exchange, GroupExchange):
            self._exchange.close()
        self._exchange = self._planner = None
        _sound(reports)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close; after an error a failed save is logged, so that the error is what is raised."""
        try:
            self.close()
        except StorageError as failure:
            if kind is None:
                raise
            log(str(failure))

    def _opened_exchange(self) -> Exchange:
        if self._exchange is None:
            self._exchange = open_exchange()
        return self._exchange

    def _opened_checkpointer(self, exchange: Exchange, token: str) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = on_all(
                exchange,
                lambda: Checkpointer(
                    self.url, rank=exchange.rank, world_size=exchange.size, attempt=token, options=self._options
                ),
            )
        return self._checkpointer

    def _address(self) -> str:
        return self.url if self.named is None else f"{self.url}/{step_folder(self.named)}"

    def _check(self, step: int, state: State, *, overlap: bool) -> None:
        """Raise UserError for arguments that no save can have."""
        if self.named is not None:
            text = f"{self.url} is saved to as a run, not as its step {self.named}"
            raise UserError(text, hint=f"Run({self.url!r})")
        check_keys(state)
        check_step(step)
        if overlap and not optimizers_in(state):
            raise UserError(
                "overlap=True waits for the copies in an optimizer's step, and the state has no optimizer",
                hint='pass {"model": model, "optimizer": optimizer}, or leave overlap out',
            )

    def _hook(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        def wait(*_: Any) -> None:
            self.wait_until_copied()

        for each in optimizers:
            if id(each) not in self._hooks:
                self._hooks[id(each)] = each.register_step_pre_hook(wait)

    def _keep(self, reports: list[SaveReport]) -> None:
        """Keep reports for `wait`; the first rank logs failures."""
        self._ended += reports
        for report in reports:
            if not report.ok and (self._exchange or Alone()).rank == 0:
                log(f"warning: step {report.step} was not saved: {report.error}")

    def _load(self, state: State, step: int, exchange: Exchange, *, strict: bool, certify: bool) -> LoadReport:
        root = self.root(step, exchange)
        with CheckpointReader(self.storage, step, root=root) as reader:
            saved = on_all(exchange, lambda: Saved(reader, exchange.rank, exchange.size))
            match = on_all(exchange, lambda: Match(saved, state))
            report = _compared(exchange, saved, match, strict=strict)
            sums = on_all(exchange, lambda: fill_from(reader, match.pieces, exchange if certify else None))
            num_certified = 0 if sums is None else sums.check(exchange, reader.url)
            on_all(exchange, match.finish)
        if report.ranks_without_rng and exchange.rank == 0:
            numbers = ", ".join(map(str, report.ranks_without_rng))
            log(f"warning: ranks {numbers} have no random state in step {step} of {self.url} and keep their own: "
                f"{saved.world_size} ranks saved it")  # fmt: skip
        return replace(report, num_certified=num_certified)


def _agree_on_load(exchange: Exchange, state: State, asked: dict[str, Any]) -> None:
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
            text = f"ranks load with different values of {name}: {', '.join(map(str, found))}"
            raise UserError(text, hint="let all ranks call load with the same arguments")


def _compared(exchange: Exchange, saved: Saved, match: Match, *, strict: bool) -> LoadReport:
    """Return what all ranks together found; the same UserError on all if it is not to be loaded."""
    mine = {
        "missing": match.missing, "faults": match.faults, "wanted": sorted(match.wanted),
        "available": sorted(match.available), "held_back": match.held_back, "lacks_rng": match.lacks_rng,
        "untied": match.untied,
    }  # fmt: skip
    packed = zlib.compress(json.dumps(mine).encode(), 1)
    heard = [json.loads(zlib.decompress(each)) for each in agreed(exchange, lambda: packed)]

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
        if any(fault.endswith(OTHER_KIND) for fault in faults):
            hint = 'make the optimizer that was saved, or leave its key out: run.load({"model": model})'
        if held_back and only_loose and not missing and not unexpected:
            hint = "leave the key out; with strict=False each rank takes that of its number, others the first's"
        if union("untied") and only_loose and not (missing or unexpected or held_back):
            hint = "give each a parameter of its own in the program; with strict=False the first is loaded into both"
        raise UserError(f"{saved.url} does not fit what is loaded from it:{listed(faults)}", hint=hint)
    lacking = tuple(rank for rank, each in enumerate(heard) if each["lacks_rng"])
    return LoadReport(saved.root.step, saved.metrics, missing, unexpected, lacking, untied=tuple(union("untied")))


def _recorded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers; UserError for what is not a number."""
    found: dict[str, Any] = {}
    if not isinstance(metrics, Mapping):
        raise UserError(f"metrics are a dict of numbers, not {metrics!r}", hint='metrics={"val_loss": 2.1}')
    for name, value in metrics.items():
        if type(value) is int and value.bit_length() > 1023:
            raise UserError(f"the metric {name!r} is an int of {value.bit_length():,} bits", hint="float(value)")
        number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
        if type(name) is not str or name == METADATA or not isinstance(number, Real):
            text = f"the metric {name!r} is {value!r}, not a number under a name of its own"
            raise UserError(text, hint='metrics={"val_loss": 2.1}')
        found[name] = number if isinstance(number, bool | int) else float(number)
    return found


def _copied(piece: Piece) -> Piece:
    """Return a piece of memory of its own."""
    return Piece(piece.name, piece.box, piece.start, piece.stop, piece.data.clone())


def _sound(reports: list[SaveReport]) -> list[SaveReport]:
    """Return reports, StorageError if a save failed; one that was skipped has not failed."""
    failed = [f"step {each.step}: {each.error}" for each in reports if not each.ok and not each.skipped]
    if failed:
        raise StorageError(f"{len(failed)} of {len(reports)} saves failed:{listed(failed)}")
    return reports
