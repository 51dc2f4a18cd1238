"""Ranks: the processes of one run, how they start together, and how they agree.

An error of any rank is raised once: `on_all` runs an action on every rank. If it fails on some, the first rank
reports it with the ranks' numbers, and all end with its exit code. Ranks agree by bytes through their `exchange`, over
gloo on CUDA runs too; values are JSON.
"""

import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckptkit import Alone, Exchange, outcomes
from ckptkit.torch import GroupExchange
from threefold.cli import log, report
from threefold.errors import StorageError, UserError
from trainer.job.failure import record
from trainer.job.flight import dead_of, end_page, write_flights_of_dead
from trainer.job.noted import NotedExchange
from trainer.job.page import Calls, RankPage
from trainer.job.rendezvous import MOST_NAMED, Board, Rendezvous
from trainer.job.stall import Stall
from trainer.job.watch import Berth, Watch, this_host
from trainer.job.whereabouts import LOST, POSTED, STAGES, RankLost, Whereabouts

T = TypeVar("T")


class Ranks:
    """A process among those that torchrun started, or alone without torchrun; its main thread makes all calls."""

    def __init__(self, device: str, *, timeout_s: float) -> None:
        """Join the process group; `device` is "cpu", "cuda" or "auto"."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("train.device is cuda, but torch finds no usable GPU", hint="--train.device cpu")
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda and local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU of its own: this node has {torch.cuda.device_count()}",
                hint=f"trainer launch --nproc-per-node {torch.cuda.device_count()} ...",
            )
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.board, self._timeout_s = Board(None), timeout_s
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            self.board = Rendezvous.of_environment(self.rank, self.world_size, timeout_s).join(backend)
        self.whereabouts = Whereabouts(self.board, self.rank, timeout_s=timeout_s) if self.world_size > 1 else None
        self.exchange: Exchange = GroupExchange() if self.world_size > 1 else Alone()
        self.page: RankPage | None = None
        self._agreement: Calls | None = None
        self.ended_by = ""  # what asked this rank to end, if that was not its last step
        self._watch: Watch | None = None
        self._berths: list[Berth] = []
        self.before_end: list[Callable[[], object]] = []  # lets go of what keeps groups from ending

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._end_page(error)
        for let_go in self.before_end:
            let_go()
        if self.whereabouts is not None:
            self.whereabouts.close()
        # NCCL would wait for ranks that hang after an error of this one; gloo aborts if it is not left in order
        if self.world_size > 1 and (kind is None or self.device.type == "cpu"):
            dist.destroy_process_group()
        if isinstance(error, RankLost) and self.whereabouts is not None and self.whereabouts.is_ended_by_another:
            record(error)
            raise SystemExit(error.exit_code) from None  # the rank that it lost says why

    def begin_page(self, folder: str) -> RankPage:
        """Note from here on what this rank does, in its page; what ends it badly has its last records in `folder`."""
        page = self.page = RankPage(self.rank, self.world_size, on_gpu=self.device.type == "cuda")
        page.describe(folder=folder)
        if self.world_size > 1:
            self._agreement = page.group("agreement", range(self.world_size))
            self.exchange = NotedExchange(self.exchange, self._agreement)
        if self.whereabouts is not None:
            self.whereabouts.before_leaving = lambda: end_page(page, "another rank ended by a fault")
        self._berths = [Berth(*values) for values in self.gather([self.rank, this_host(), page.path, os.getpid()])]
        return page

    def begin_watch(self, stall_s: float, on_stall: Callable[[Stall], None]) -> None:
        """Let a thread see when the job makes no progress for some seconds; all ranks call it, with a page."""
        page = self.page
        assert page is not None, "a watch reads pages"
        on_gpu = self.device.type == "cuda"
        self._watch = Watch(
            page, self._berths, self.board, on_stall, stall_s=stall_s, spins=on_gpu, on_device=page.first_pending
        )

    def _end_page(self, error: BaseException | None) -> None:
        if self._watch is not None:
            self._watch.close()
        if self.page is None:
            return
        said = f"{type(error).__name__}: {error}" if error is not None else self.ended_by
        path = end_page(self.page, said or None)
        is_said = isinstance(error, SystemExit)  # an error that all ranks met was said, and is the job's last line
        if path is not None and self.rank == 0 and not is_said:
            log(f"what each rank did last is in {path.parent}")

    @property
    def _pages_here(self) -> list[str]:
        return [berth.path for berth in self._berths if berth.host == this_host()]

    def leave_if_lost(self) -> None:
        """End this process at once if a rank is gone without a word: no step can be saved without its part.

        A thread may call it, as the training thread may wait for that rank without an end: on a GPU a collective does.
        Ranks of other hosts are heard of on the board.
        """
        if self.whereabouts is None or self.board.read(POSTED) is not None:
            return
        if dead := dead_of(self._pages_here):
            self.board.post(LOST, ", ".join(str(sight.rank) for sight in dead))
            write_flights_of_dead(self._pages_here, "it was lost by another rank")
        if (gone := self.board.read(LOST)) is None:
            return
        if self.board.claim(f"{LOST}: said"):
            who = f"ranks {gone} of {self.world_size} are" if "," in gone else f"rank {gone} of {self.world_size} is"
            log(f"SIGTERM: {who} gone; the others end at once, and save nothing")
        self.whereabouts.leave(f"gone without a word: {gone}")

    def post_end(self) -> None:
        """Let the other ranks know that this one ends by a fault that it reports itself."""
        if self.whereabouts is not None:
            self.whereabouts.post_end()

    def on_all(self, action: Callable[[], T]) -> T:
        """Run an action on every rank and return its value; if it fails on any rank, fail on all."""
        try:
            value = action()
        except Exception as error:
            self.raise_on_all(error)
            raise AssertionError("raise_on_all raises on a rank that has an error") from error
        self.raise_on_all(None)
        return value

    def naming_rank(self, action: Callable[[], T]) -> T:
        """Run an action in which ranks cannot agree on errors: one names this rank and ends it, and so the job."""
        if self.world_size == 1:
            return action()
        where = self.where([self.rank])
        try:
            return action()
        except UserError as error:
            error.message = where + error.message
            raise
        except OSError as error:
            raise StorageError(f"{where}{error}") from error
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not re.search("gloo|pair closure", str(error)):
                raise
            raise self._lost(where, error) from error

    def note(self, step: int, stage: str) -> None:
        """Note where this rank is, for others that may wait for it in vain: in a step, and in one of its STAGES."""
        if self.page is not None:
            self.page.note(step, stage)
        if self.whereabouts is not None and stage in STAGES:
            self.whereabouts.note(step, stage)

    def _lost(self, where: str, error: RuntimeError) -> "RankLost":
        """Return the error of a call that others did not come to: those that are late are named, if that is known.

        The place in gloo's source and its guess are left out of what it says.
        """
        said = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". This is typically")[0]
        text = "; ".join([said, *getattr(error, "__notes__", ())])
        if self.whereabouts is not None:
            self.whereabouts.close()  # this rank ends by itself
        if not re.search("time(d )?out", text, re.IGNORECASE):
            write_flights_of_dead(self._pages_here, "it was lost by another rank")
            return RankLost(
                f"{where}another rank is gone: {text}",
                hint="what ended it is above or in its log; the same command resumes",
            )
        assert self.whereabouts is not None, "a process alone waits for nobody"
        behind = self.whereabouts.behind(range(self.world_size))
        late = [f"rank {rank} was last {place}" for rank, place in behind.items() if place is not None]
        late += [f"rank {rank} was not heard of" for rank, place in behind.items() if place is None]
        who = "; ".join(late[:MOST_NAMED]) + (f" and {len(late) - MOST_NAMED} more" if len(late) > MOST_NAMED else "")
        seen = self._watch.stall().cause_lines if self._watch is not None else []
        late_text = f"within {self._timeout_s:g} s: {who or 'which of them is not known'}: {text}"
        return RankLost(
            "\n  ".join(
                [
                    f"{where}{self.whereabouts.place}, others did not come {late_text}",
                    *seen,
                ]
            ),
            hint="the logs of those that are late say why; --parallel.timeout-s waits longer, the same command resumes",
        )

    def raise_on_all(self, error: Exception | None) -> None:
        """Return if no rank has an error; else the first rank reports it and all exit with its code."""
        faults = self.faults(error)
        if not faults:
            return
        fault = faults[min(faults)]
        if self.world_size == 1 and error is not None:
            raise error
        agreed = type(fault)(self.summary(faults), hint=fault.hint)
        record(agreed)
        if error is not None and not isinstance(error, UserError | OSError):
            traceback.print_exception(error)  # a fault of ours: the rank that has it prints its place
        if self.rank == 0:
            report(agreed)
        self.maximum([0.0])  # torchrun ends all ranks when one exits: not before all is said
        raise SystemExit(fault.exit_code) from error

    def faults(self, error: Exception | None) -> dict[int, UserError]:
        """Return the errors of all ranks by rank, the same dict on each of them."""
        mine: UserError | None = error if isinstance(error, UserError) else None
        if isinstance(error, OSError):
            mine = StorageError(str(error))
        elif error is not None and not isinstance(error, UserError):
            mine = UserError(f"{type(error).__name__}: {error}")
        return outcomes(self.exchange, error=mine)[1]

    def summary(self, faults: Mapping[int, UserError]) -> str:
        """Return the first rank's fault, and the ranks that have one unless all have the same."""
        everywhere = len(faults) == self.world_size and len({fault.message for fault in faults.values()}) == 1
        return ("" if everywhere else self.where(faults)) + faults[min(faults)].message

    def where(self, ranks: Iterable[int]) -> str:
        """Return what a message about some ranks begins with: `on ranks 3, 7 of 32: `; nothing for a process alone."""
        if self.world_size == 1:
            return ""
        numbers = sorted(ranks)
        shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
        return f"on rank{'s' if len(numbers) > 1 else ''} {shown} of {self.world_size}: "

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on all ranks; as of JSON, a tuple comes as a list, a number as key as a text."""
        return [json.loads(data) for data in self.exchange.all_gather(json.dumps(value).encode())]

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value, on all ranks, as `gather` does."""
        data = b"" if self.rank else json.dumps(value).encode()
        return json.loads(self.exchange.all_gather(data)[0])

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the ranks; one small collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """Return the mean of a value over the ranks; one small collective."""
        return self._reduced([value], dist.ReduceOp.SUM)[0] / self.world_size

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank, which receives it."""
        dist.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with the next one that a rank sends here."""
        dist.recv(tensor, source)

    def _reduced(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            with self._agreeing():
                dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        calls = self._agreement
        if calls is not None:
            calls.begin("all_reduce", waits=True)
        yield
        if calls is not None:
            calls.end()

    def say(self, text: str) -> None:
        """Print one line on the console, once for all ranks."""
        if self.rank == 0:
            log(text)
