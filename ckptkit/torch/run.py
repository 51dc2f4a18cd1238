"""Run: a run that any PyTorch program saves to and loads from."""

import heapq
import itertools
import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from shlex import quote
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckptkit.format.keys import check_step
from ckptkit.handoff.report import SaveReport
from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.fallback import first_sound
from ckptkit.runs.rollback import RollbackReport
from ckptkit.runs.run import Run as AnyRun
from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.saving.options import CheckpointerOptions, WhenBusy
from ckptkit.torch.collection import paused_collection
from ckptkit.torch.ended import EndedSaves
from ckptkit.torch.exchange import GroupExchange, open_exchange
from ckptkit.torch.places import Places
from ckptkit.torch.state.agreement import LoadReport, agree_on_load, fill_state
from ckptkit.torch.state.capture import check_keys
from ckptkit.torch.state.late import LateTensors, swaps_weights
from ckptkit.torch.state.objects import optimizers_in
from ckptkit.torch.state.saving import SavePlanner, as_numbers
from threefold.cli import log
from threefold.closing import Closing
from threefold.errors import StorageError, UserError

State = Mapping[str, Any]
DEFAULTS = CheckpointerOptions()
NEVER = sys.maxsize  # a Checkpointer counts its own rank's failures; here all ranks stop together
FAILED, BUSY = "num_failed", "is_busy"  # what each rank says of itself before a save


class Run(AnyRun, Closing):
    """A run at a URL, with `save`, `load`, `wait` and `close` for the state of a PyTorch program.

    A state is a dict by names of modules, optimizers, objects with state_dict and load_state_dict, tensors, DTensors,
    and of numbers, strings, bytes, arrays, lists and dicts of these; `"rng": True` is the random state of each rank.
    All ranks of torch.distributed call `save` and `load` together, in one order and with one step. Use it in a `with`,
    or close it: that waits for the last save. The thread that made it calls its methods. With an `exchange` its ranks
    are all that there are. With `{node}` in the URL each node saves to its own disk, and `url` is this one's: then all
    ranks call `newest`, `newest_first`, `resolve` and `rollback` together too, and other methods see this disk alone.
    """

    def __init__(
        self, url: Any, options: CheckpointerOptions = DEFAULTS, *, exchange: Exchange | None = None
    ) -> None:  # fmt: skip
        super().__init__(url)
        if not isinstance(options, CheckpointerOptions):
            raise UserError(
                f"options of a run are CheckpointerOptions, not {type(options).__name__}",
                hint=f"Run({self.url!r}, ckptkit.CheckpointerOptions())",
            )
        self._places = Places(self.url, options)
        self.url = self._places.own_url
        if exchange is not None and not hasattr(exchange, "all_gather"):
            raise UserError(f"an exchange has all_gather, {type(exchange).__name__} has not", hint="leave it out")
        self._options = options
        self._exchange = exchange
        self._planner: SavePlanner | None = None
        self._checkpointer: Checkpointer | None = None
        self._ended: EndedSaves | None = None
        self._num_known_failed = 0  # in a row, on any rank
        self._newest_at_load: int | None = None
        self._last_step: int | None = None  # that was ordered
        self.whole_step: int | None = None  # of a first tier of the nodes' own: the newest known to be whole
        self._hooks: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()

    def save(
        self, step: int, state: State, metrics: Mapping[str, float] | None = None, *, overlap: bool = False
    ) -> float:
        """Copy this rank's state, which the writer process then saves as a step; return the seconds until it is copied.

        `metrics` are recorded in the root, where `ckptkit ls`, `best` and retention find them; the first rank's count.
        With `overlap` parameters and states of the optimizers in the state are copied beside the next forward and
        backward, and these optimizers wait for that before their next step; if one of them changes before, the save
        fails and names it. All else is copied at once. Raise UserError for what no checkpoint can hold, StorageError
        after `max_failed_saves` failures in a row on any rank; another failure is logged, and raised by `wait`.
        """
        started = time.monotonic()
        exchange = self._opened_exchange()
        self._planner = self._planner or SavePlanner(exchange)
        self.wait_until_copied()
        if self._options.when_busy == "wait":
            self._collect(wait=True)

        def check() -> dict[str, Any]:
            self._check(step, state, overlap=overlap)
            return as_numbers(metrics or {})

        with paused_collection():
            plan = self._planner.plan(step, state, secrets.token_hex(8), check, self._status())
        checkpointer = self._opened_checkpointer(exchange, plan.token, step)
        if plan.status[FAILED] > self._num_known_failed:
            checkpointer.copy_next()  # the slower tiers lack that step
        self._num_known_failed = plan.status[FAILED]
        if self.is_of_nodes and not plan.status[FAILED] and not plan.status[BUSY]:
            self.whole_step = self.whole_step if self._last_step is None else self._last_step
        checkpointer.needed = () if self.whole_step is None else (self.whole_step,)
        if self._options.when_busy == "skip" and plan.status[BUSY]:
            error = "skipped: a save before it still runs"
            self._ended_saves.add([SaveReport(step, False, error, 0, 0.0, 0.0, skipped=True, url=checkpointer.url)])
            return time.monotonic() - started
        if self.is_of_nodes and step == self._last_step and not plan.status[BUSY]:  # again, as a node has not saved it
            self._places.nodes(exchange).set_aside_broken(step)
        self._last_step = step
        pieces, late = plan.pieces, LateTensors(plan.late if overlap else {})
        if overlap:
            pieces = [p if p.name in plan.late else replace(p, data=p.data.clone()) for p in pieces]
            self._hook(each for each in optimizers_in(state) if not swaps_weights(each))
        with paused_collection():
            checkpointer.save(
                step, pieces, tensors=plan.table, layout=ParallelLayout(dp=exchange.size), num_layers=1,
                metadata=plan.metadata, overlap=overlap, change=late.change,
            )  # fmt: skip
        self._collect()
        return time.monotonic() - started

    def load(
        self, state: State, step: int | None = None, *, strict: bool = True, certify: bool = True,
        sets_aside: bool = True,
    ) -> LoadReport:  # fmt: skip
        """Fill a state in place from a committed step, by default the newest that is sound, and report what was found.

        A save of this Run that still runs is waited for first. Damaged steps that are passed over are set aside then,
        unless `sets_aside` is False, so that the run can save them again. What slower tiers hold counts too.
        Keys of the checkpoint that `state` leaves out are left alone. Raise UserError, before anything is changed, with
        all names that are missing, unexpected or of another shape or dtype; with strict=False the first two are in the
        report alone. Optimizers get the states that they do not have yet. `certify` has tensors that all ranks together
        load whole compared with the certificate of the save; CheckFailed names those that are not equal to it.
        """
        exchange = self._opened_exchange()
        self._collect(wait=True)
        agree_on_load(exchange, state, {"step": step, "strict": strict, "certify": certify})
        only = self.named if step is None else step
        say = log if exchange.rank == 0 else lambda line: None
        with paused_collection():
            loaded, report, damaged = first_sound(
                self._places.candidates(exchange, only),
                lambda candidate: self._places.read(
                    candidate,
                    exchange,
                    lambda reader: fill_state(state, reader, exchange, strict=strict, certify=certify),
                ),
                strict=False,
                report=say,
            )
        if sets_aside and only is None:
            self._places.set_aside(loaded, damaged, exchange)
        self._newest_at_load, self._last_step = self._newest_known(exchange), None
        self.whole_step = report.step if self.is_of_nodes else None
        if sets_aside and step is not None and self.named is None and step < (self._newest_at_load or 0):
            say(f"step {self._newest_at_load} is newer than {step}: run.rollback({step}) sets what is newer aside, "
                "so that it can be saved again")  # fmt: skip
        return replace(report, damaged=tuple(damaged))

    def newest_first(self) -> Iterator[int]:
        """Return the committed steps, newest first, also those that only a slower tier holds.

        Of a first tier that is each node's own, those that are whole.
        """
        if self.is_of_nodes:
            return self._places.whole(self._opened_exchange(), self.named)
        steps, slower = super().newest_first(), self._places.slower
        if not slower:
            return steps
        if self.named is not None:
            return iter([self.named] if any(run.is_committed(self.named) for run in (self, *slower)) else [])
        merged = heapq.merge(steps, *(place.newest_first() for place in slower), reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def rollback(self, step: int, *, dry_run: bool = False) -> RollbackReport:
        """Make a committed step the newest: set all newer ones aside; UserError if one is pinned.

        A save of this Run that still runs is waited for. Where the first tier is each node's own: on every node, and in
        slower tiers.
        """
        self._collect(wait=True)
        if not self.is_of_nodes:
            return super().rollback(step, dry_run=dry_run)
        report = self._places.rollback(step, self._opened_exchange(), dry_run=dry_run)
        if not dry_run:
            self._last_step, self.whole_step = None, step
        return report

    @property
    def is_of_nodes(self) -> bool:
        """Whether the first tier is each node's own."""
        return self._places.are_of_nodes

    def own_places(self) -> list[AnyRun]:
        """Return the places that this rank keeps in order: on the first rank, or the first of a node, else none."""
        return self._places.own(self._opened_exchange())

    @property
    def is_saving(self) -> bool:
        """Whether this rank's save still runs; does not wait."""
        return self._checkpointer is not None and self._checkpointer.is_busy

    @property
    def copied_steps(self) -> set[int]:
        """The steps that this rank copies to slower tiers, or has to: one that is removed before does not get there."""
        self._collect()
        return set() if self._checkpointer is None else self._checkpointer.copies.steps

    def wait_until_copied(self) -> float:
        """Wait until the copies of a save with `overlap` are made; return the seconds that took."""
        return self._checkpointer.join() if self._checkpointer is not None else 0.0

    def wait(self) -> list[SaveReport]:
        """Wait until no save runs; return how the saves since the last call ended, StorageError if one failed."""
        self._collect(wait=True)
        return self._ended.take() if self._ended is not None else []

    def has_saved(self, step: int) -> bool:
        """Return, on all ranks together, whether a step is committed, of nodes whole; first wait for saves."""
        self._collect(wait=True)
        exchange = self._opened_exchange()
        if self.is_of_nodes:
            return next(self._places.whole(exchange, step), None) is not None
        there = agreed(exchange, lambda: json.dumps(exchange.rank == 0 and self.is_committed(step)).encode())
        return bool(json.loads(there[0]))

    def close(self) -> None:
        """Wait for the running save and end the writer process; StorageError if a save failed that was not reported.

        The last step goes to all slower tiers before.
        """
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        checkpointer, self._checkpointer = self._checkpointer, None
        ended = self._ended
        try:
            if checkpointer is not None and ended is not None:
                ended.add(checkpointer.close(copies_last=True))
        finally:
            if isinstance(self._exchange, GroupExchange):
                self._exchange.close()
            self._exchange = self._planner = self._ended = None
            self._places.forget()
        if ended is not None:
            ended.take()

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

    def _opened_checkpointer(self, exchange: Exchange, token: str, step: int) -> Checkpointer:
        if self._checkpointer is None:
            newest = self._places.prepare_saves(step, token, exchange)
            self.whole_step = newest if self.whole_step is None else self.whole_step
            options = self._own_options(exchange)
            self._checkpointer = on_all(
                exchange,
                lambda: Checkpointer(
                    self.url, rank=exchange.rank, world_size=exchange.size, attempt=token, options=options
                ),
            )
            url, leads = self._checkpointer.url, bool(self.own_places())
            self._ended = EndedSaves(url, self._is_committed_since, is_first=leads)
        return self._checkpointer

    def _own_options(self, exchange: Exchange) -> CheckpointerOptions:
        """Return the options of this rank's Checkpointer: what all ranks decide together is none of its own."""
        tiers = self._places.destinations(exchange, self._newest_at_load)
        when_busy: WhenBusy = "abort" if self._options.when_busy == "abort" else "wait"
        node = self._places.node
        return replace(self._options, tiers=tiers, node=node, max_failed_saves=NEVER, when_busy=when_busy)

    def _is_committed_since(self, step: int) -> bool:
        """Return whether a step was committed after this run was loaded, perhaps by a writer of an earlier start."""
        if self.is_of_nodes or self._newest_at_load is None or step <= self._newest_at_load:
            return False  # of another attempt than that of other nodes
        try:
            return self.is_committed(step, durably=True)
        except StorageError:
            return False

    @property
    def _ended_saves(self) -> EndedSaves:
        assert self._ended is not None, "made with the Checkpointer"
        return self._ended

    def _status(self) -> dict[str, int]:
        """Return what all ranks have to know of this one before a save."""
        if self._checkpointer is None:
            return {FAILED: 0, BUSY: 0}
        is_busy = self._checkpointer.is_busy
        self._collect()
        return {FAILED: self._ended_saves.num_failed, BUSY: int(is_busy)}

    def _collect(self, *, wait: bool = False) -> None:
        """Keep the reports of the saves that ended, or with `wait` of all."""
        if self._checkpointer is not None:
            self._ended_saves.add(self._checkpointer.wait() if wait else self._checkpointer.poll())

    def _check(self, step: int, state: State, *, overlap: bool) -> None:
        """Raise UserError for arguments that no save can have."""
        if self.named is not None:
            raise UserError(f"{self.url} is saved to as a run, not as its step {self.named}", hint=f"Run({self.url!r})")
        check_keys(state)
        check_step(step)
        if self._ended is not None and self._ended.num_failed >= self._options.max_failed_saves:
            raise StorageError(
                f"{self._ended.num_failed} saves in a row failed, the last: {self._ended.last_error}",
                hint=f"safe steps: ckptkit ls {quote(self.url)}",
            )
        if overlap and not optimizers_in(state):
            raise UserError(
                "overlap=True waits for the copies in an optimizer's step, and the state has no optimizer",
                hint='pass {"model": model, "optimizer": optimizer}, or leave overlap out',
            )

    def _hook(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        def wait(*_: Any) -> None:
            self.wait_until_copied()

        for each in optimizers:
            if each not in self._hooks:
                self._hooks[each] = each.register_step_pre_hook(wait)

    def _newest_known(self, exchange: Exchange) -> int | None:
        if self.is_of_nodes:
            return self.newest()
        heard = agreed(exchange, lambda: json.dumps(self.newest()).encode() if exchange.rank == 0 else b"")
        newest: int | None = json.loads(heard[0])
        return newest
