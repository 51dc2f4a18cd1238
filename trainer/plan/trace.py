"""A step of one rank without numbers: its own code runs on tensors that have only shapes, and each call is noted.

So what a rank transfers is read off the code that trains, not off a model of it, and so is what it multiplies while a
transfer is under way. The passes of a micro-batch between the second one and the last call what the second one calls:
they are noted, not run. Rows of experts that travel to single ranks are spread evenly, since no router has spoken.
"""

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trainer.config import Config, OpsConfig
from trainer.config.resolve import keeps_gathered, layout_of
from trainer.engine import Engine
from trainer.linear.weight import Products, Weight
from trainer.mesh.mesh import mesh_of
from trainer.model.chunk import Chunk
from trainer.model.embedding import anchor
from trainer.model.microbatch import Batch, MicroBatch
from trainer.ops.attention.seam import Backend, Gradients, Mask, Saved
from trainer.ops.dtypes import wide_dtype
from trainer.pipeline.actions import PASSES
from trainer.verify.recording import Call, Recording

SHAPES = torch.device("meta")
PACKAGE = Path(__file__).parent.parent
WAYS = ("mesh", "verify", "plan")  # folders through which a call goes; what is behind them is why it is made
WAYS_OF_PRODUCTS = ("forward", "dgrad", "wgrad")
REASONS = {
    "parallel/collectives.py": "tokens of tp",
    "linear/linear.py": "tokens of tp",
    "linear/overlapped.py": "tokens of tp",
    "linear/fp8.py": "maxima of eight bits",
    "parallel/cross_entropy.py": "cross-entropy",
    "parallel/context.py": "attention of cp",
    "parallel/dispatch.py": "tokens of experts",
    "parallel/rows.py": "rows of experts",
    "model/balance.py": "balance of experts",
    "store/bucket.py:_start_sum": "sums of gradients",
    "store/bucket.py:_start_next": "updated weights",
    "store/residence.py": "weights for a pass",
    "store/muon.py": "whole matrices of Muon",
    "store/norms.py": "norms by layer",
    "pipeline/executor.py": "between stages",
    "engine.py": "loss, norm and counts",
}

OF_STORE = (  # reasons that are no tokens'
    "sums of gradients",
    "updated weights",
    "whole matrices of Muon",
    "weights for a pass",
    "norms by layer",
    "loss, norm and counts",
    "rows of experts",
)


class Move(NamedTuple):
    """One call of a group by a rank, and why it is made; the bytes are those of the call's tensor.

    `way` is F, B or W for the call of a pass. `beside` are the operations of products, and `beside_w` of those for
    weights, that the rank makes before it waits for the call.
    """

    kind: str
    group: str
    num_bytes: int
    reason: str
    way: str = ""
    beside: int = 0
    beside_w: int = 0

    def scaled(self, factor: float) -> "Move":
        """Return that of so many times the tokens."""
        sizes = {name: round(getattr(self, name) * factor) for name in ("num_bytes", "beside", "beside_w")}
        return self._replace(**sizes)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank calls in a step, how often, and the engine that did, which holds shapes alone."""

    engine: Engine
    moves: Counter[Move]


def traced(config: Config, rank: int, *, step: int = 0) -> Trace:
    """Return what a rank of a resolved configuration calls in the step that follows `step` steps."""
    plain = replace(config, ops=replace(OpsConfig(), attention="reference"))
    ledger = Ledger()
    network = Recording(Unfinished(layout_of(config).world_size, ledger), ledger.note)
    with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.simplefilter("ignore")  # that the device lacks native ops
        engine = Engine(plain, mesh_of(plain, rank, SHAPES, network=network))
        shapes: Backend = Shapes()
        engine.choices.attention = dict.fromkeys(engine.choices.attention, shapes)
        ledger.moves.clear()
        num_microbatches = config.train.gradient_accumulation_steps
        if num_microbatches > 3 and not regathers(config):
            ledger.last = num_microbatches - 1
            chunks: dict[int, Any] = {stage: Repeating(chunk, ledger) for stage, chunk in engine.chunks.items()}
            engine.chunks = cast(dict[int, Chunk], chunks)
        engine.pipeline.note = ledger.begin
        for weight in engine.store.weights:
            if len(weight.shape) == 2:
                weight.gemm = cast(Products, Noted(weight, ledger))
        engine.start_step(step, batch_of(config))
    return Trace(engine, ledger.moves)


def regathers(config: Config) -> bool:
    """Return whether what a pass gathers depends on the passes before it, those of other stages among them."""
    return config.parallel.zero_stage == 3 and config.parallel.pp > 1 and not keeps_gathered(config)


def batch_of(config: Config) -> Batch:
    """Return the shapes of a data-parallel rank's share of a step, in rows of the first length."""
    train = config.train
    shape = train.gradient_accumulation_steps, train.micro_batch_size, train.seq_length
    tokens = torch.empty(shape, dtype=torch.int64, device=SHAPES)
    return Batch(tokens, tokens, tokens, torch.empty(shape, device=SHAPES), 0)


def reason_here() -> str:
    """Return why the call under way is made: by the innermost code that is not on its way to the network."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and (place := path.relative_to(PACKAGE)).parts[0] not in WAYS:
            name = place.as_posix()
            reason = REASONS.get(name) or REASONS.get(f"{name}:{frame.f_code.co_name}")
            assert reason is not None, f"no reason is known for calls of {name}:{frame.f_code.co_name}"
            return reason
        frame = cast(Any, frame.f_back)
    raise AssertionError("a call is made by the trainer")


@dataclass(slots=True)
class UnderWay:
    """A call under way, and the counts that it is among; its wait notes what was multiplied beside it."""

    move: Move
    counts: tuple[Counter[Move], ...]
    under_way: "list[UnderWay]" = field(repr=False)
    beside: list[int] = field(default_factory=lambda: [0, 0])  # of products, and of those for weights

    def wait(self) -> None:
        """Take it that the call is waited for."""
        self.under_way.remove(self)
        if any(self.beside):
            for counts in self.counts:
                counts[self.move] -= 1
                if not counts[self.move]:
                    del counts[self.move]
                counts[self.move._replace(beside=self.beside[0], beside_w=self.beside[1])] += 1


class Ledger:
    """The moves of a rank; those of the second micro-batch's passes count for each that is not run."""

    def __init__(self) -> None:
        self.moves: Counter[Move] = Counter()
        self.last = 0  # the last micro-batch; 0 if each is run
        self.is_repeated = False  # the pass under way
        self.under_way: list[UnderWay] = []
        self._way = ""
        self._of_pass: dict[tuple[str, int], Counter[Move]] = defaultdict(Counter)
        self._open: Counter[Move] | None = None  # of the pass under way, if others repeat it

    def begin(self, kind: str, stage: int, microbatch: int) -> None:
        """Take it that an action begins; of one that is repeated all calls are made here."""
        is_pass = kind in PASSES
        self._way = kind if is_pass else ""
        self.is_repeated = is_pass and 1 < microbatch < self.last
        self._open = self._of_pass[kind, stage] if is_pass and microbatch == 1 else None
        if self.is_repeated:
            self.moves.update(self._of_pass[kind, stage])

    def note(self, call: Call) -> None:
        """Note a call, which is under way until it is waited for."""
        move = Move(*call, reason_here(), self._way)
        counts = (self.moves,) if self._open is None else (self.moves, self._open)
        for each in counts:
            each[move] += 1
        self.under_way.append(UnderWay(move, counts, self.under_way))

    def multiply(self, operations: int, *, is_of_weight: bool) -> None:
        """Take it that a product is made, beside the first of the calls for tokens that are under way."""
        started = next((call for call in self.under_way if call.move.reason not in OF_STORE), None)
        if started is not None:
            started.beside[is_of_weight] += operations


class Unfinished:
    """A network of this rank alone, and its transports, whose calls are under way until they are waited for."""

    def __init__(self, world_size: int, ledger: Ledger) -> None:
        self.world_size, self._ledger = world_size, ledger

    def connect(self, name: str, ranks: Sequence[int]) -> "Unfinished":
        """Return what carries nothing."""
        return self

    def _carry(self, *_arguments: object, is_async: bool = False, **_options: object) -> UnderWay | None:
        started = self._ledger.under_way[-1]
        if is_async:
            return started
        started.wait()
        return None

    all_reduce = broadcast = reduce_scatter = all_gather = all_gather_coalesced = all_to_all = send = receive = _carry


class Noted:
    """The products of a weight, each noted with its operations."""

    def __init__(self, weight: Weight, ledger: Ledger) -> None:
        self._real, self._ledger, self._numel = weight.gemm, ledger, weight.shape.numel()
        self._num_rows = 0  # of what was taken or shared last: a format may have it otherwise
        for name in ("take", "share", "forward", "dgrad", "wgrad"):
            setattr(self, name, partial(self._noted, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _noted(self, name: str, x: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(x, Tensor):
            self._num_rows = len(x)
        if name in WAYS_OF_PRODUCTS:
            self._ledger.multiply(2 * self._num_rows * self._numel, is_of_weight=name == "wgrad")
        return getattr(self._real, name)(x, *arguments, **options)


class Repeating:
    """A chunk whose repeated passes hand on what has the shapes of their results, and nothing else."""

    def __init__(self, chunk: Chunk, ledger: Ledger) -> None:
        self.head, self._chunk, self._ledger = chunk.head, chunk, ledger
        self._like = torch.empty(0, device=SHAPES)

    def forward(self, received_TD: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return what the chunk does."""
        if not self._ledger.is_repeated:
            out = self._chunk.forward(received_TD, batch)
            self._like = out.detach()
            return out
        start = anchor(SHAPES) if received_TD is None else received_TD
        return _Repeated.apply(start, self._like)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, like: Tensor) -> Tensor:
        ctx.save_for_backward(start)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (start,) = ctx.saved_tensors
        return torch.empty_like(start), None


class Shapes:
    """The attention of tensors that have only shapes."""

    name = "shapes"
    drops_weights = True

    def refusal(self, q_TNH: Tensor, k_UKH: Tensor, mask: Mask) -> str | None:
        return None

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the shapes of the result and of the lse."""
        lse_NT = q_TNH.new_empty(q_TNH.shape[1], len(q_TNH), dtype=wide_dtype(q_TNH.dtype))
        return torch.empty_like(q_TNH), lse_NT

    def backward(self, dout_TNH: Tensor, saved: Saved, mask: Mask) -> Gradients:
        """Return the shapes of the gradients."""
        q_TNH, k_UKH, v_UKH, _, _ = saved
        return torch.empty_like(q_TNH), torch.empty_like(k_UKH), torch.empty_like(v_UKH)


def moved_bytes(moves: Counter[Move]) -> int:
    """Return the bytes of all calls."""
    return sum(move.num_bytes * count for move, count in moves.items())


def totals(moves: Counter[Move]) -> Sequence[tuple[str, str, str, int, int]]:
    """Return kind, group, reason, calls and bytes of each sum of moves that differ in their sizes alone."""
    calls: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for move, count in moves.items():
        key = move.kind, move.group, move.reason
        calls[key] += count
        sizes[key] += count * move.num_bytes
    return [(*key, calls[key], sizes[key]) for key in calls]
