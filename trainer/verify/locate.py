"""Where a failed check fails first, and in how small a run it still fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from threefold.errors import UserError
from trainer.config import Config, ParallelConfig
from trainer.config.check import cross_faults
from trainer.config.resolve import layout_of, resolve
from trainer.verify.bench import NUM_STEPS, Bench
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.compare import compare_states
from trainer.verify.difference import Different
from trainer.verify.result import Result
from trainer.verify.shrink import shrunk

OF_EXPERTS = ("ep", "etp", "moe_dispatch", "moe_rows", "moe_overlap_parts")


def located(result: Result, bench: Bench, *, deadline: float, max_ranks: int) -> Result:
    """Return a failed result with the first step and tensor that differ, and the smallest run that still fails."""
    texts = [result.text, first_difference(bench), smallest(result.name, bench.run, deadline, max_ranks)]
    return replace(result, text="; ".join(text for text in texts if text))


def first_difference(bench: Bench) -> str:
    """Return the first step behind which a tensor of the layout differs from one process; "" if none does.

    Clipping would spread the fault of one gradient over all: the first step is taken without it.
    """
    unclipped = Bench.beside(bench, replace(bench.config, optim=replace(bench.config.optim, clip=0.0)))
    for place, num_steps in ((unclipped, 1), *((bench, number) for number in range(1, NUM_STEPS + 1))):
        try:
            compare_states(place.trial(num_steps), place.trial(num_steps, alone=True))
        except Different as difference:
            return f"first behind step {num_steps}: {difference}"
        except Exception:
            return ""  # a trial that ends says so itself
    return ""


def smallest(name: str, run: Config, deadline: float, max_ranks: int) -> str:
    """Return the layout and the model of the smallest run in which a check still fails, as far as time allows."""
    smallest_run, is_smaller = run, False
    for smaller in _reductions():
        candidate = smaller(smallest_run)
        if candidate == smallest_run or perf_counter() >= deadline or not _is_sound(candidate):
            continue
        with TemporaryDirectory() as folder:
            try:
                bench = Bench(shrunk(candidate, max_ranks=max_ranks), candidate, Path(folder))
            except UserError:
                continue
            if run_check(name, CHECKS[name], bench).state == "FAILED":
                smallest_run, is_smaller = candidate, True
    if not is_smaller:
        return ""
    small = shrunk(smallest_run, max_ranks=max_ranks).config
    return f"it still fails with {layout_of(small)}, {small.model.num_layers} layers"


def _reductions() -> Iterator[Callable[[Config], Config]]:
    """Yield ways to a smaller run: an axis of one rank, plainer options, fewer layers."""
    plain = ParallelConfig()

    def without(*names: str) -> Callable[[Config], Config]:
        return lambda run: _with(run, **{name: getattr(plain, name) for name in names})

    yield without(*OF_EXPERTS)
    for axis in ("pp", "cp", "tp"):
        others = {"pp": ("virtual_stages", "pipeline_layout", "schedule"), "cp": ("cp_method",), "tp": ()}[axis]
        yield without(axis, *others)
    yield lambda run: _with(run, dp=1, dp_shard=0)
    yield lambda run: _with(run, dp=min(run.parallel.dp, 2), dp_shard=0)
    yield without("zero_stage", "zero_whole_kib", "dp_shard", "reshard_after_forward")
    yield without("virtual_stages", "pipeline_layout")
    yield lambda run: replace(run, model=replace(run.model, num_layers=run.parallel.pp * run.parallel.virtual_stages))


def _with(run: Config, **parallel: object) -> Config:
    return replace(run, parallel=replace(run.parallel, **parallel))  # type: ignore[arg-type]


def _is_sound(run: Config) -> bool:
    parallel = run.parallel
    num_ranks = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    train = replace(run.train, gradient_accumulation_steps=0)
    return not cross_faults(replace(run, train=train), num_ranks) and bool(resolve(run, num_ranks))
