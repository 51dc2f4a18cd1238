"""How a run comes back: the newest committed step that every rank can restore.

`--save` that holds a committed step wins, of several tiers the one with the newest, of equal ones the fastest; `--load`
seeds an empty run only, or names an older step of the run itself to go back to. Damage that one rank finds makes all
ranks fall back to the same step of a slower tier, or to the same older one; a checkpoint of another model is refused,
never skipped.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptkit import Candidate, Exchange, Root, Run, Tiers, first_sound, identified, open_source, set_aside
from threefold.errors import CheckFailed, UserError, quoted
from trainer.checkpoint.changes import changes_of_model, changes_of_run, recorded_config, with_old_parts
from trainer.checkpoint.load import has_optimizer, open_exchange, restore_step
from trainer.checkpoint.node_local import NodeLocalSteps
from trainer.checkpoint.progress import Progress, Resumed, Validation
from trainer.checkpoint.resets import Reset, reset_lines, reset_of, voids_of
from trainer.checkpoint.rewind import rewind, rewind_target
from trainer.config import Config
from trainer.config.data import LOSS
from trainer.config.resolve import settled, shared_urls
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.loss_scale import recorded_in
from trainer.store.lr import learning_rate


def resume(ranks: Ranks, engine: Engine, config: Config, tiers: Tiers | None) -> Resumed:
    """Restore the newest step that all ranks can read; the start of a run if nothing was saved."""
    own = NodeLocalSteps(ranks, config, tiers)
    target = ranks.broadcast(ranks.on_all(lambda: rewind_target(config.checkpoint, tiers) if ranks.rank == 0 else None))
    if target is not None:
        found: Iterator[Candidate] = iter([Candidate(target[0], target[1])])
    else:
        found = candidates_heard(ranks, tiers, own.steps, load=config.checkpoint.load)
    first = next(found, None)
    if first is None:
        require_step(config, "nothing is there to resume")
        own.quarantine_after(-1)
        engine.initialise()
        if tiers is not None:
            ranks.say("nothing is there to resume: starts at step 0")
        return Resumed(Progress(), settled(config))
    with open_exchange(ranks, config) as exchange:
        found = itertools.chain([first], found)
        url, root = restore_any(ranks, engine, found, exchange, own, strict=config.checkpoint.strict)
    own.quarantine_after(root.step if url == own.url else root.step - 1)
    is_own = tiers is not None and url == tiers.first.url
    reset = reset_of(engine.table, root.tensors)
    read = ranks.on_all(lambda: read_metadata(root, url, config, reset, is_own=is_own))
    if tiers is None or url not in tiers.urls:  # another run
        read = replace(read, progress=replace(read.progress, run=""))
    if tiers is not None and target is not None:
        ranks.say(ranks.on_all(lambda: rewind(tiers, root.step) if ranks.rank == 0 else ""))
    before = recorded_config(root)
    if has_optimizer(root):
        read = replace(read, ops=with_old_parts(read.ops, before))
        config = with_cool_down(settled(config, before), before, root.step)
        ranks.say(f"resumed from step {root.step} of {url}")
        changes = [*reset_lines(reset), *changes_of_run(root, before, config, ranks.device, read.ops)]
    else:
        require_step(config, f"{url} holds no optimizer state")
        config = settled(config)
        ranks.say(f"starts from the parameters of {url}, which holds no optimizer state")
        changes = changes_of_model(root, before, config)
    for line in changes:
        ranks.say(line)
    newest = ranks.on_all(lambda: newest_of_tiers(tiers, own.steps, root.step) if ranks.rank == 0 else {})
    sinks = before.log.to if read.progress.run else ()
    return replace(read, config=config, newest=ranks.broadcast(newest), sinks=sinks)


def candidates_heard(ranks: Ranks, tiers: Tiers | None, of_nodes: Iterable[int], *, load: str) -> Iterator[Candidate]:
    """Yield the `candidates` on all ranks together.

    The first rank looks for the next as it is taken, with its attempt if it is of the run; others hear of it.
    """
    found = candidates(tiers, of_nodes, load=load) if ranks.rank == 0 else iter(())
    found = (identified(each) if each.url in shared_urls(tiers) else each for each in found)
    while candidate := ranks.broadcast(ranks.on_all(lambda: next(found, None))):
        yield Candidate(*candidate)


def candidates(tiers: Tiers | None, of_nodes: Iterable[int], *, load: str) -> Iterator[Candidate]:
    """Yield what may be resumed, newest first; nothing for a run that starts from nothing.

    Of one step the faster tier comes before the slower. `of_nodes` are the steps of a first tier that is each node's.
    A `load` that is the run itself seeds nothing.
    """
    for url in tiers.urls if tiers else ():
        if (run := Run(url)).named is not None:
            text = f"--save {url} names one step, a run is saved to a folder of steps"
            raise UserError(text, hint=f"--save {quoted(run.url)}")
    places = steps_of_tiers(tiers, of_nodes).values()
    found: Iterator[Candidate] = heapq.merge(*places, key=lambda each: -each.step)  # of equal ones the first tier's
    first = next(found, None)
    if first is None and load and load.rstrip("/") not in (tiers.urls if tiers else ()):
        found = steps_of(load)
        first = next(found, None)
        if first is None:
            raise nothing_to_load(load)
    if first is not None:
        yield first
        yield from found


def nothing_to_load(load: str) -> UserError:
    """Return the error for a place without a committed step, which says what is there instead."""
    text = f"{load} holds no committed step to seed the run with"
    try:
        open_source(load).resolve()
    except UserError as why:
        return UserError(f"{text}: {why.message}", hint=why.hint)
    return UserError(text, hint="start again: a step was committed there just now")


def steps_of_tiers(tiers: Tiers | None, of_nodes: Iterable[int]) -> dict[str, Iterator[Candidate]]:
    """Return the committed steps of each tier by its URL, newest first."""
    places = (tiers.first, *tiers.slower) if tiers else ()
    own = sorted(of_nodes, reverse=True)
    return {
        tier.url: iter([Candidate(tier.url, step) for step in own]) if tier.of_node else steps_of(tier.url)
        for tier in places
    }


def newest_of_tiers(tiers: Tiers | None, of_nodes: Iterable[int], last: int) -> dict[str, int]:
    """Return the newest step of each tier that holds any, none newer than `last`."""
    newest = {
        url: next((each.step for each in steps if each.step <= last), None)
        for url, steps in steps_of_tiers(tiers, of_nodes).items()
    }
    return {url: step for url, step in newest.items() if step is not None}


def steps_of(url: str) -> Iterator[Candidate]:
    """Return the committed steps of a run URL, newest first, or the one that a step URL names."""
    run = open_source(url)
    return (Candidate(run.url, step) for step in run.newest_first())


def restore_any(
    ranks: Ranks,
    engine: Engine,
    found: Iterable[Candidate],
    exchange: Exchange | None,
    own: NodeLocalSteps,
    *,
    strict: bool,
) -> tuple[str, Root]:
    """Restore the first of `found` that no rank finds damaged into every rank's engine; return its URL and root.

    A damaged step of the run's tiers stops counting as committed once another is restored: its root is kept under
    another name, so that the run can save that step again.
    """

    def attempt(candidate: Candidate) -> Root | None:
        url, step = candidate.url, candidate.step
        root: Root | None = None
        error: Exception | None = None
        try:
            if url == own.url:  # each node from where it finds the step
                root = own.restore(engine, step)
            else:
                root = restore_step(engine, open_source(url), step, exchange)
        except (UserError, OSError) as caught:
            error = caught
        faults = ranks.faults(error)
        if faults and all(isinstance(fault, CheckFailed) for fault in faults.values()):
            raise CheckFailed(ranks.summary(faults))
        ranks.raise_on_all(error)
        return root

    try:
        taken, root, damaged = first_sound(found, attempt, strict=strict, report=ranks.say)
    except CheckFailed as damage:
        ranks.raise_on_all(damage)
        raise
    assert root is not None, "restored on every rank"
    engine.store.publish()
    own_damaged = [each for each in damaged if each.url in own.shared_urls and ranks.rank == 0]
    ranks.on_all(lambda: set_aside(own_damaged, ranks.say))
    return taken.url, root


def read_metadata(root: Root, url: str, config: Config, reset: Reset | None, *, is_own: bool) -> Resumed:
    """Return what a root records of the run; UserError if it was not saved by this trainer.

    A step without optimizer state, an imported model, is where a run begins.
    """
    if not has_optimizer(root):
        return Resumed(Progress(root.step), config, url=url, is_own=is_own)
    try:
        metadata = root.metadata
        measured = {name: value for name, value in metadata.items() if name.partition("/")[0] == LOSS}
        losses = {name: float(value) for name, value in measured.items() if value is not None}
        validation = Validation(int(metadata["val_step"]), losses) if losses else None
        cursor, stream = dict(metadata["cursor"]), metadata.get("stream")
        voids = voids_of(root, reset)
        scale = recorded_in(metadata)
        run = str(metadata.get("run", ""))
        progress = Progress(root.step, int(metadata["tokens"]), cursor, validation, stream, voids, scale, run)
        ops = {str(op): str(name) for op, name in metadata.get("ops", {}).items()}
        loss = float("nan") if metadata["loss"] is None else float(metadata["loss"])  # of void steps alone
        return Resumed(progress, config, loss, url, is_own, ops=ops)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"step {root.step} of {url} holds no state of a training run", hint="--load another") from None


def with_cool_down(config: Config, before: Config, step: int) -> Config:
    """Return the settled configuration of a run that goes on from a step with its cool-down, asked for now or before.

    The rate falls to min_lr from where the step before would have gone on. For example `--cool-down 100` from step 500
    ends at step 600. Its beginning is recorded: a later start with as many steps, or none named, goes on with that.
    """
    asked, was = config.optim, before.optim
    is_going_on = asked.cool_down_steps in (0, was.cool_down_steps) and asked.cool_down_from in (0, was.cool_down_from)
    if was.cool_down_steps > 0 and is_going_on:
        steps, first, rate = was.cool_down_steps, was.cool_down_from, was.cool_down_lr
    elif asked.cool_down_steps > 0:
        steps, first = asked.cool_down_steps, asked.cool_down_from or step
        rate = asked.cool_down_lr or learning_rate(was, first)
    else:
        return replace(config, optim=replace(asked, cool_down_steps=0))
    optim = replace(asked, cool_down_steps=steps, cool_down_from=first, cool_down_lr=rate)
    return replace(config, optim=optim, train=replace(config.train, train_steps=first + steps))


def require_step(config: Config, what: str) -> None:
    """Raise UserError if a start without a saved state asks for a cool-down."""
    if config.optim.cool_down_steps > 0:
        hint = f"--load RUN/step-000000100 --cool-down {config.optim.cool_down_steps}"
        raise UserError(f"a cool-down begins from a saved step: {what}", hint=hint)
