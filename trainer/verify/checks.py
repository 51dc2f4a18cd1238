"""The checks of a small run, in the order in which they are made, each with what it found and what it allows.

Every check compares the run's layout with one process, or with itself: what a layout, a schedule, a save, a resume or
another precision may not change. One that is not made, for want of time or of the option that it is about, is never
called sound.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from time import perf_counter
from typing import Literal

import torch

from ckptkit import CheckpointReader, ParallelLayout, Root, Run, hash_checkpoint, reshard
from threefold.errors import UserError
from threefold.storage import open_storage
from trainer.config import Config
from trainer.config.resolve import kv_replicas, layout_of
from trainer.data import to_device
from trainer.pipeline.graph import WARM_UP_STEPS
from trainer.run.memory_check import with_values
from trainer.verify import plain_model
from trainer.verify.bench import NUM_STEPS, SAVED_AT, Bench, alone_of, nothing_again
from trainer.verify.compare import (
    EVALUATED,
    LOSSES_WITHIN,
    WEIGHTS_WITHIN,
    compare_bits,
    compare_losses,
    compare_states,
    compare_tensors,
    determined,
)
from trainer.verify.difference import Different
from trainer.verify.host_waits import watching_tensors
from trainer.verify.initial import compare_initial
from trainer.verify.result import Figure, NotNeeded, NotRun, Result, State
from trainer.verify.samples_read import samples
from trainer.verify.shrink import forms_of_cpu, shrunk
from trainer.verify.trial import SavedStep, Stream, first_weights, read_stream, try_steps, with_stores

COARSE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2, "fp64": LOSSES_WITHIN}  # relative, of a loss of few steps


def losses_and_norms(bench: Bench) -> Figure:
    """Compare losses, gradient norms, counts of tokens and an evaluation of every rank with one process."""
    gap = compare_losses(bench.layout, bench.reference)
    return Figure(f"{gap:.1e}", f"{LOSSES_WITHIN:.0e} relative")


def weights(bench: Bench) -> Figure:
    """Compare the weights, masters and moments that all ranks hold together with those of one process."""
    gap = compare_states(bench.layout, bench.reference)
    return Figure(f"{gap:.1e}", f"{WEIGHTS_WITHIN:.0e}")


def plain(bench: Bench) -> Figure:
    """Compare one process with the model, its training and an evaluation in plain torch, written apart."""
    state, reference = first_weights(bench.alone), bench.reference
    spread = plain_model.Spread(bench.alone.model)
    batches, largest = [to_device(host, torch.device("cpu")) for host in bench.whole_stream.batches[0]], 0.0
    seen = reference.ranks[0]
    expected = enumerate(plain_model.train(bench.alone, state, batches, spread))
    pairs = [
        (f"{name} of step {step + 1}", own[step], other)
        for step, others in expected
        for name, own, other in zip(("loss", "gradient norm"), (seen.losses, seen.norms), others, strict=True)
    ]
    evaluated = plain_model.evaluation(bench.alone, state, batches[-1], spread)
    pairs += zip(EVALUATED, seen.evaluation, evaluated)
    for name, own, other in pairs:
        gap = abs(own - other) / abs(other)
        if not gap <= LOSSES_WITHIN:
            raise Different(f"the {name} is {own!r}, and {other!r} in plain torch")
        largest = max(largest, gap)
    whole, state = reference.whole(), determined(bench.alone, state)
    compare_tensors({name: whole[name] for name in state}, {name: value.detach() for name, value in state.items()})
    return Figure(f"{largest:.1e}", f"{LOSSES_WITHIN:.0e} relative")


def collectives(bench: Bench) -> Figure:
    """Compare what the ranks of each group called of it: the same calls, of the same sizes, in the same order."""
    if layout_of(bench.config).world_size == 1:
        raise NotNeeded("one process calls nothing")
    calls = [len(seen.calls) for seen in bench.layout.ranks]  # a call that differs ends the trial
    return Figure(f"{max(calls):,} calls a rank", "in one order on all")


def initial_values(bench: Bench) -> Figure:
    """Compare what all ranks begin with with one process, bit by bit, and that with what is configured."""
    layout, alone = (try_steps(config, Stream((), ()), 0) for config in (bench.config, bench.alone))
    compare_bits(alone, layout, "the layout")
    off = compare_initial(bench.config.model, alone.whole())
    return Figure(f"{off:.1%}", "as a draw varies")


def schedules(bench: Bench) -> Figure:
    """Compare the run's schedule and what it makes again with the plainest ones, bit by bit."""
    config = bench.config
    others = [
        replace(config, parallel=replace(config.parallel, schedule=schedule))
        for schedule in ("gpipe", "1f1b", "zb-h1")
        if config.parallel.pp > 1 and schedule != config.parallel.schedule
    ]
    if config.train.recompute != "none":
        others.append(replace(config, train=nothing_again(config.train)))
    parallel = replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
    if parallel != config.parallel and config.parallel.dp > 1:
        others.append(replace(config, parallel=parallel))
    if not others:
        raise NotNeeded("the run has one stage, makes nothing again and overlaps nothing")
    few = bench.trial(SAVED_AT)
    for other in others:
        compare_bits(few, try_steps(other, bench.stream, SAVED_AT), _named(config, other))
    return Figure(f"{len(others)} others", "equal bits")


def one_graph(bench: Bench) -> Figure:
    """Compare passes that are recorded, and run again with other batches, with passes of each step, bit by bit."""
    if not bench.run.train.cuda_graphs:
        raise NotNeeded("the run records no passes")
    _compare_without(bench, "train.cuda_graphs")
    return Figure(f"{NUM_STEPS - WARM_UP_STEPS} recorded steps", "equal bits")


def streamed(bench: Bench) -> Figure:
    """Compare updates of state that is streamed in pieces, each copy as late as may be, with plain ones, bit by bit."""
    if not bench.run.optim.offload:
        raise NotNeeded("masters and moments are where the weights are")
    _compare_without(bench, "optim.offload")
    return Figure(f"{NUM_STEPS} steps", "equal bits")


def _compare_without(bench: Bench, option: str) -> None:
    """Compare steps with an option that is on or off with those without it, bit by bit."""
    off, on = (
        try_steps(with_values(bench.config, {option: is_on}), bench.stream, NUM_STEPS) for is_on in (False, True)
    )
    compare_bits(off, on, f"{option} true")


def _named(config: Config, other: Config) -> str:
    """Return the options of another run that differ."""
    tables = {name: (asdict(getattr(config, name)), asdict(getattr(other, name))) for name in ("parallel", "train")}
    return ", ".join(
        f"{table}.{key} {value}"
        for table, (before, after) in tables.items()
        for key, value in after.items()
        if before[key] != value
    )


def resume(bench: Bench) -> Figure:
    """Save in the middle, restore in new ranks, and compare the rest with the run that went on, bit by bit.

    A run of another optimizer must be refused.
    """
    cursor = _root(bench.start).metadata["cursor"]
    stream = read_stream(bench.config, NUM_STEPS - SAVED_AT, cursor=cursor, first=SAVED_AT)
    later = try_steps(bench.config, stream, NUM_STEPS - SAVED_AT, start=bench.start)
    uncut = bench.layout
    tail = replace(uncut, ranks=[replace(s, losses=s.losses[SAVED_AT:], norms=s.norms[SAVED_AT:]) for s in uncut.ranks])
    compare_bits(tail, later, f"a resume at step {SAVED_AT}")
    _refuse_another_optimizer(bench)
    return Figure(f"from step {SAVED_AT}", "equal bits")


def _refuse_another_optimizer(bench: Bench) -> None:
    """Raise Different if a run of another optimizer goes on from the saved step, though it was not allowed to."""
    name: Literal["lion", "adamw"] = "lion" if bench.config.optim.name == "adamw" else "adamw"
    optim = replace(bench.config.optim, name=name, allow_reset=False)
    try:
        try_steps(replace(bench.alone, optim=optim), Stream((), ()), 0, start=bench.start)
    except UserError:
        return
    raise Different(f"a run of {name} goes on from a step of {bench.config.optim.name}, and its states begin at zero")


def _root(start: SavedStep) -> Root:
    return Run(start.url).root(start.step)


def another_layout(bench: Bench) -> Figure:
    """Go on from the saved step in one process, and compare with the run that went on."""
    later = try_steps(bench.alone, bench.whole_stream, NUM_STEPS - SAVED_AT, start=bench.start)
    for own, expected in zip(later.ranks[0].losses, bench.layout.ranks[0].losses[SAVED_AT:], strict=True):
        if not abs(own - expected) <= LOSSES_WITHIN * abs(expected):
            raise Different(f"a loss behind step {SAVED_AT} is {own!r} in one process, and {expected!r} in the layout")
    return Figure(f"{compare_states(bench.layout, later):.1e}", f"{WEIGHTS_WITHIN:.0e}")


def certificate(bench: Bench) -> Figure:
    """Reshard the saved step for one process and back: its hash stays."""
    source, hashes = open_storage(bench.start.url), []
    places = {"one": ParallelLayout(), "back": layout_of(bench.config)}
    with CheckpointReader(source, SAVED_AT) as reader:
        hashes.append(hash_checkpoint(reader))
    for name, layout in places.items():
        target = open_storage(str(bench.folder / name))
        with CheckpointReader(source, SAVED_AT) as reader:
            reshard(reader, target, layout)
        with CheckpointReader(target, SAVED_AT) as reader:
            hashes.append(hash_checkpoint(reader))
        source = target
    if len(set(map(str, hashes))) > 1:
        raise Different(f"the step's hash is {hashes[0]}, and {hashes[1]}, {hashes[2]} once it was resharded")
    return Figure("2 reshards", "equal hashes")


def host_waits(bench: Bench) -> Figure:
    """Take a step in which each call is an error for which a host would wait for its GPU."""
    if bench.config.parallel.moe_dispatch == "alltoall" and bench.config.parallel.ep > 1:
        raise NotNeeded("with moe_dispatch alltoall hosts wait for the counts of each layer")
    with watching_tensors():
        try_steps(bench.config, bench.stream, 2, refuses_waits=True)
    return Figure("a step", "no wait")


def run_precision(bench: Bench) -> Figure:
    """Compare losses in the run's own precision with those in float64, as far as that is coarse."""
    precision = bench.run.train.precision
    if precision == "fp64":
        raise NotNeeded("the run is of float64 itself")
    optim = replace(bench.config.optim, moments=bench.run.optim.moments, master=bench.run.optim.master)
    config = replace(bench.config, train=replace(bench.config.train, precision=precision), optim=optim)
    trial, largest = try_steps(config, bench.stream, SAVED_AT), 0.0
    for step, (own, expected) in enumerate(zip(trial.ranks[0].losses, bench.reference.ranks[0].losses), 1):
        gap = abs(own - expected) / abs(expected)
        if not gap <= COARSE[precision]:
            raise Different(f"the loss of step {step} is {own:.6g} in {precision}, and {expected:.6g} in float64")
        largest = max(largest, gap)
    return Figure(f"{largest:.1e}", f"{COARSE[precision]:.0e} relative")


def eight_bits(bench: Bench) -> Figure:
    """Compare the layout with one process where products are in eight bits, in a small run of sizes that have these."""
    run = bench.run
    if run.fp8.recipe == "off":
        raise NotNeeded("no product is in eight bits")
    if kv_replicas(run) > 1 and run.fp8.recipe != "blockwise":
        raise NotNeeded("ranks that share key-value heads have other scales than one process")
    wide = Bench(
        shrunk(run, max_ranks=layout_of(bench.config).world_size, unit=run.fp8.size), run, bench.folder / "wide"
    )
    layout, alone = (wide.trial(1, alone=is_alone) for is_alone in (False, True))
    gap = compare_losses(layout, alone)
    compare_states(layout, alone)
    return Figure(f"{gap:.1e}", f"{LOSSES_WITHIN:.0e} relative")


def rounded_sums(bench: Bench) -> Figure:
    """Compare a run whose gradients are rounded to travel with itself, resumed and in other orders, bit by bit."""
    how = bench.run.parallel.grad_reduce
    if how == "wide":
        raise NotNeeded("gradients travel in the dtype in which they are added")
    config = replace(bench.config, parallel=replace(bench.config.parallel, grad_reduce=how))
    rounded, largest = Bench.of_stores(config, bench.run, bench.folder / "rounded"), 0.0
    resume(rounded)
    with suppress(NotNeeded):
        schedules(rounded)
    seen, reference = rounded.layout.ranks[0], bench.reference.ranks[0]
    for own, expected in zip(seen.losses + seen.norms, reference.losses + reference.norms, strict=True):
        largest = max(largest, abs(own - expected) / abs(expected))
    if not largest <= COARSE["bf16"]:
        raise Different(f"a loss or a gradient norm is off by {largest:.1e} of that of one process")
    return Figure(f"equal bits, then {largest:.1e}", f"{COARSE['bf16']:.0e} relative")


def newest_step(bench: Bench) -> Figure:
    """Restore the run's own newest step in its layout and in one process: the same bits, and one step that agrees."""
    start, run = bench.saved, bench.run
    if start is None:
        raise NotNeeded("a configuration has no saved step")
    size = 4 * sum(info.size_bytes for info in _root(start).tensors.values())  # held and copied, in both
    if size > (room := os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise NotRun(f"it takes {size / 2**30:.1f} GiB of memory here, and {room / 2**30:.1f} GiB are free")
    on_cpu = replace(run, train=replace(run.train, device="cpu"), ops=forms_of_cpu(run))
    layout = with_stores(on_cpu, bench.folder / "newest")
    alone = alone_of(layout)
    held = [try_steps(config, Stream((), ()), 0, start=start) for config in (layout, alone)]
    compare_bits(held[0], held[1], "one process")
    losses = []
    for config in (layout, alone):
        stream = read_stream(config, 1, first=start.step)
        losses += [seen.losses[0] for seen in try_steps(config, stream, 1, start=start).ranks]
    gap, precision = max(losses) / min(losses) - 1, run.train.precision
    if not gap <= COARSE[precision]:
        raise Different(f"the loss of step {start.step + 1} is {losses[0]:.9g}, and {losses[-1]:.9g} in one process")
    return Figure(f"equal bits, then {gap:.1e}", f"{COARSE[precision]:.0e} relative")


CHECKS: dict[str, Callable[[Bench], Figure]] = {
    "samples of each step": samples,
    "order of collectives": collectives,
    "initial values": initial_values,
    "one process, plain torch": plain,
    "losses, norms, evaluation": losses_and_norms,
    "weights and moments": weights,
    "resume, the same layout": resume,
    "resume, one process": another_layout,
    "save and reshard": certificate,
    "no wait of the host": host_waits,
    "precision of the run": run_precision,
    "products in eight bits": eight_bits,
    "schedule, recompute, overlap": schedules,
    "passes as one graph": one_graph,
    "optimizer state streamed": streamed,
    "gradients rounded to travel": rounded_sums,
    "the run's newest step": newest_step,
}


def run_check(name: str, check: Callable[[Bench], Figure], bench: Bench) -> Result:
    """Make a check; an error of any kind in a trial fails it, as it would end the run."""
    begin = perf_counter()
    try:
        figure = check(bench)
    except (NotRun, NotNeeded) as reason:
        state: State = "not run" if isinstance(reason, NotRun) else "not needed"
        return Result(name, state, text=str(reason), seconds=perf_counter() - begin)
    except Exception as error:
        text = str(error) if isinstance(error, Different) else f"{type(error).__name__}: {error}"
        return Result(name, "FAILED", text=text, seconds=perf_counter() - begin)
    return Result(name, "ok", figure.difference, figure.bound, seconds=perf_counter() - begin)
