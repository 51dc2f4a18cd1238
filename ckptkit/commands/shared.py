"""What several verbs of the `ckptkit` command have in common: arguments, addresses and hints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Literal

from threefold.cli import log, print_json, print_line, report
from threefold.console import live
from threefold.errors import CheckFailed, UserError
from threefold.options import argument, option

if TYPE_CHECKING:
    from ckptkit.foreign.folder import ForeignFolder
    from ckptkit.foreign.folder_export import ExportReport
    from ckptkit.loading.chunk_source import RewriteSource
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.rewrite.reshard import ReshardReport
    from ckptkit.runs.pruning import PruneReport
    from ckptkit.runs.record import StepRecord
    from ckptkit.runs.run import Run
    from threefold.storage import Storage

LINES_EVERY_S = 10.0  # of progress, where no terminal is
MAX_NAMED = 16
CKPT_HELP = "run URL (its newest committed step) or step URL: a path, s3://..., or any fsspec URL"


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Options of a verb that reports."""

    json: bool = option(False, "print one JSON document")


@dataclass(frozen=True, kw_only=True)
class OfRun(Reporting):
    """Options of a verb on a run."""

    run: str = argument("RUN", "run URL: a path, s3://..., or any fsspec URL")


@dataclass(frozen=True, kw_only=True)
class OfSteps(Reporting):
    """Options of a verb on some steps."""

    steps: tuple[str, ...] = argument("STEP_URL", "step URL, such as runs/a/step-000000100")


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint(Reporting):
    """Options of a verb on one checkpoint."""

    source: str = argument("CKPT", CKPT_HELP)


@dataclass(frozen=True, kw_only=True)
class OfTensors:
    """Options that choose tensors."""

    only: tuple[str, ...] = option(
        (), "only tensors of such a name, as 'optim.*'; may be repeated", repeats=True, metavar="PATTERN"
    )


@dataclass(frozen=True, kw_only=True)
class ByMetric:
    """Options that name a metric."""

    metric: str = option("val_loss", "metric by which steps are compared", metavar="NAME")
    max: bool = option(False, "the largest is the best, not the smallest")

    @property
    def mode(self) -> Literal["min", "max"]:
        """Which value is the best."""
        return "max" if self.max else "min"


@contextmanager
def opened(url: str) -> "Iterator[RewriteSource]":
    """Yield an open source of what a URL means; where damage ends the block, a hint points to other steps."""
    from ckptkit.foreign.hf.folder import open_source
    from ckptkit.foreign.kinds import meant
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.runs.run import Run

    return_large_frees()
    source: Run | ForeignFolder = meant(url) or open_source(url)
    try:
        with source.open(source.resolve()) as reader:
            yield reader
    except CheckFailed as damage:
        if not isinstance(source, Run):
            raise
        raise pointing_to_other_steps(damage, source) from damage


def whole_run(url: str, verb: str) -> "Run":
    """Return the run whose steps `--all` means, which has some; a step and another program's folder are refused."""
    from ckptkit.foreign.hf.folder import open_source
    from ckptkit.foreign.kinds import meant
    from ckptkit.runs.catalogue import no_step
    from ckptkit.runs.run import Run

    source = meant(url) or open_source(url)
    if not isinstance(source, Run) or source.named is not None:
        raise UserError(f"--all {verb} a run, {url} is one step", hint="leave --all out")
    if source.newest() is None:
        raise no_step(source.storage)
    return source


def share_of_run(url: str, verb: str) -> str:
    """Return the end of a report's line that says which share of a run's steps one was; "" for all of them."""
    from ckptkit.foreign.hf.folder import open_source
    from ckptkit.foreign.kinds import meant
    from ckptkit.runs.catalogue import counted_steps
    from ckptkit.runs.run import Run

    source = meant(url) or open_source(url)
    if not isinstance(source, Run) or source.named is not None:
        return ""
    count, is_exact = counted_steps(source.storage)
    return f"; 1 of {'' if is_exact else 'about '}{count:,} steps (--all {verb} each)" if count > 1 else ""


def for_each_step(source: "Run", act: "Callable[[CheckpointReader], None]") -> list[int]:
    """Act on a reader of each committed step, oldest first, past damaged ones; return those that are damaged.

    Damage is reported where it is met. A step that is pruned meanwhile does not count.
    """
    damaged = []
    for step in source.steps():
        try:
            with source.open(step) as reader:
                act(reader)
        except CheckFailed as damage:
            report(damage)
            damaged.append(step)
        except UserError:
            if source.is_committed(step):
                raise
            log(f"step {step} was pruned meanwhile")
    return damaged


def pointing_to_other_steps(damage: CheckFailed, source: "Run") -> CheckFailed:
    """Return damage with a hint, which says how to find another step where there was none."""
    return CheckFailed(damage.message, hint=damage.hint or f"ckptkit ls {quote(source.url)}")


@contextmanager
def shown_bytes() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many bytes of how many are done."""
    with live(lines_every_s=LINES_EVERY_S) as shown:
        yield lambda done, total: shown.show(f"{done:,} of {total:,} bytes", done / max(total, 1))


def print_written(done: "ReshardReport | ExportReport", *, is_there: bool, as_json: bool) -> None:
    """Print what an import or an export wrote, or would write, and what was there; `is_there`: all of it was."""
    if as_json:
        print_json(asdict(done))
    elif is_there:
        print_line(f"{done.url}: is there already, {done.num_files} files")
    else:
        did = "would be written" if done.dry_run else f"written in {done.seconds:.1f} s"
        kept = f", {done.bytes_kept:,} were there" if done.bytes_kept else ""
        certified = getattr(done, "num_certified", 0)
        equal = f", {certified:,} tensors equal to what was saved" if certified else ""
        print_line(f"{done.url}: {done.num_files} files, {done.bytes_written:,} bytes {did}{kept}{equal}")


def open_run(url: str, hint: str) -> "Storage":
    """Return the storage of a run; a step's URL is refused, and its run put into the hint."""
    from ckptkit.format.address import open_address

    storage, step = open_address(url)
    if step is not None:
        raise UserError(f"{url} is one step, not a run", hint=hint.format(storage.url))
    return storage


def step_named(url: str) -> "Run":
    """Return the run of a step's URL, with the step as `named`; any other URL is refused."""
    from ckptkit.runs.catalogue import not_a_run
    from ckptkit.runs.run import Run

    found = Run(url)
    if found.named is None:
        if other := not_a_run(found.storage):
            raise other
        raise UserError(f"{url} is not the URL of a step", hint=f"choose one: ckptkit ls {quote(found.storage.url)}")
    return found


def check_metric(records: "Sequence[StepRecord]", metric: str, storage: "Storage") -> None:
    """Refuse a metric that no step has, with those that there are."""
    from ckptkit.runs.catalogue import no_step

    if not records:
        raise no_step(storage)
    names = sorted({name for record in records for name in record.metrics()}, key=lambda name: (name.count("."), name))
    if metric not in names:
        there = ", ".join(names[:MAX_NAMED]) + (", ..." if names[MAX_NAMED:] else "") if names else "none"
        hint = f"--metric {names[0]}" if names else "record numbers in the metadata of saves"
        raise UserError(f"no step of {storage.url} has the metric {metric}; there are: {there}", hint=hint)


def each_step(
    options: OfSteps,
    done: str,
    find: "Callable[[str], tuple[Storage, int | None]]",
    act: "Callable[[Storage, int], bool | None]",
) -> None:
    """Find the steps that URLs name, all before the first is changed, act on each, and report to which it was done."""
    from ckptkit.format.keys import step_folder

    for url in options.steps:
        step_named(url)
    addresses = [(storage, step) for storage, step in map(find, options.steps) if step is not None]
    urls = []
    for storage, step in addresses:
        url = f"{storage.url}/{step_folder(step)}"
        if act(storage, step) is False:
            log(f"{url} was not {done.removeprefix('un')}")
        else:
            urls.append(url)
    if options.json:
        print_json({done: urls})
    else:
        for url in urls:
            print_line(f"{done} {url}")


def print_deleted(report: "PruneReport", *, as_json: bool) -> None:
    """Print which steps and files were deleted, or would be, and why other steps stay."""
    if as_json:
        print_json(asdict(report))
        return
    going = "would delete" if report.dry_run else "deleted"
    for number in sorted({*report.deleted, *report.kept}):
        outcome = going if number in report.deleted else f"kept: {', '.join(report.kept[number])}"
        print_line(f"{number:>10}  {outcome}")
    for keys, what in (
        (report.orphans, "of no committed step"),
        (report.hidden, "a write that broke off"),
        (report.empty_folders, "an empty folder"),
        (report.uploads, "an unfinished upload"),
    ):
        for key in keys:
            print_line(f"{going} {key}, {what}")
    for key in report.left_alone:
        print_line(f"left alone: {key}")
    num_steps = len(report.deleted)
    print_line(f"{report.url}: {going} {num_steps} steps, {report.num_files:,} files, {report.num_bytes:,} bytes")
