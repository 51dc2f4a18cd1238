"""The verbs on the steps of a run: ls, best, pin, unpin, prune. numpy is imported by the verbs, never for --help."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.verb import Verbs, add_verb, whole_number
from threefold.cli import Parser, log, print_json, print_line
from threefold.console import print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError

if TYPE_CHECKING:
    from ckptkit.runs.pruning import PruneReport
    from ckptkit.runs.record import StepRecord
    from threefold.storage import Storage

RUN_HELP = "run URL: a path, s3://..., or any fsspec URL"
STEP_HELP = "step URL, such as runs/a/step-000000100"
COLUMNS = ("step", "tokens", "loss", "val_loss", "lr", "layout", "bytes", "saved_at", "seconds", "pinned", "marks")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_NAMED = 16


def add_run_verbs(verbs: "Verbs[Parser]") -> None:
    """Add the parsers."""
    ls = add_verb(
        verbs,
        "ls",
        ls_verb,
        summary="list a run's committed steps",
        description="List a run's committed steps with what their roots record. A root that is damaged is told in its "
        "row, and the exit code is 1.",
    )
    ls.add_argument("run", metavar="RUN", help="run URL, or step URL: a path, s3://..., or any fsspec URL")
    ls.add_argument(
        "--sort", choices=COLUMNS[:-2], default="step", metavar="KEY", help=f"sort by {', '.join(COLUMNS[:-2])}"
    )

    best = add_verb(
        verbs,
        "best",
        best_verb,
        summary="print the URL of the step with the best metric",
        description="Print the URL of the step whose metric is smallest, or largest with --max; of equal ones the "
        "newest. A metric is a number in the metadata of the root, dotted where it lies deeper: config.optim.lr.",
    )
    best.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_metric(best)

    pin = add_verb(
        verbs,
        "pin",
        pin_verb,
        summary="keep a step from being pruned",
        description="Pin steps: no retention policy deletes them, whatever it asks.",
    )
    pin.add_argument("--note", default="", help="why, for `ckptkit ls --json`")
    unpin = add_verb(verbs, "unpin", unpin_verb, summary="take a pin away", description="Take the pins of steps away.")
    for verb in (pin, unpin):
        verb.add_argument("steps", nargs="+", metavar="STEP_URL", help=STEP_HELP)

    prune = add_verb(
        verbs,
        "prune",
        prune_verb,
        summary="delete steps that no rule keeps",
        description="Delete the steps that none of the given rules keeps, and the files of saves that never were "
        "committed. Pinned steps and the newest good step stay, whatever is asked; without a rule all steps stay. "
        "Files that are not of the checkpoint format are left alone.",
    )
    prune.add_argument("run", metavar="RUN", help=RUN_HELP)
    for name, what in (
        ("last", "keep the newest N steps"),
        ("every", "keep the first step at or after each multiple of N"),
        ("best", "keep the N steps with the best metric"),
        ("hourly", "keep the newest step of each of the last N hours that have one"),
    ):
        prune.add_argument(f"--keep-{name}", type=whole_number(0), default=0, metavar="N", help=what)
    add_metric(prune)
    prune.add_argument(
        "--orphans-older-than",
        type=duration,
        default=argparse.SUPPRESS,
        metavar="AGE",
        help="delete all that uncommitted saves left and that is at least so old, such as 90m, 24h or 7d; 0s may hit a "
        "save that is running. Without it: what is a day old, of steps before the newest committed one",
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")


def add_metric(verb: Parser) -> None:
    """The flags that name a metric."""
    verb.add_argument("--metric", default="val_loss", metavar="NAME", help="metric that tells which steps are best")
    verb.add_argument("--max", action="store_true", help="the largest is the best, not the smallest")


def duration(text: str) -> float:
    """Seconds of a text such as 90m, 24h or 7d."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90m, 24h or 7d")
    return float(match[1]) * SECONDS[match[2]]


def open_run(url: str, hint: str) -> "Storage":
    """The storage of a run; a step's URL is refused, and its run put into the hint."""
    from ckptkit.format.address import open_address

    storage, step = open_address(url)
    if step is not None:
        raise UserError(f"{url} is one step, not a run", hint=hint.format(storage.url))
    return storage


def ls_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.format.address import open_address
    from ckptkit.runs.catalogue import listed_steps, look_up, missing_place, no_step
    from ckptkit.runs.record import Records

    storage, step = open_address(arguments.run)
    found = Records(storage).of(listed_steps(storage) if step is None else [look_up(storage, step)])
    if not found and (step is not None or missing_place(storage)):
        raise no_step(storage, step)
    rows = ls_rows(found, storage.url, is_run=step is None)
    rows.sort(key=lambda row: (row[arguments.sort] is None, row[arguments.sort]))
    if arguments.json:
        print_json(rows)
    elif rows:
        cells = [[cell(row, column) for column in COLUMNS] for row in rows]
        print_table(COLUMNS, cells, left={"layout", "marks"})
    else:
        log(f"no committed step in {arguments.run}")
    return EXIT_CHECK_FAILED if any("error" in row for row in rows) else EXIT_OK


def ls_rows(found: "Sequence[StepRecord]", url: str, *, is_run: bool) -> list[dict[str, Any]]:
    """Return a row for each record: the columns of the table, None where there is nothing to show, more for --json.

    Steps are marked only where all of a run are listed, among which one is the newest and one the best.
    """
    from ckptkit.format.keys import step_folder
    from ckptkit.format.saved import utc_text
    from ckptkit.runs.retention import ranked

    marked = {"newest": found[-1:], "best": ranked(found, "val_loss", "min")[:1]} if is_run else {}
    rows = []
    for record in found:
        metrics, saved = record.metrics(), record.saved
        marks = [mark for mark, holders in marked.items() if record in holders]
        row: dict[str, Any] = {"step": record.step, "url": f"{url}/{step_folder(record.step)}"}
        row |= {key: metrics.get(key) for key in ("tokens", "loss", "val_loss", "val_step", "lr")}
        row |= {
            "layout": record.layout or None,
            "bytes": record.file_bytes if record.is_readable else None,
            "num_files": record.num_files if record.is_readable else None,
            "attempt": record.attempt or None,
            "cursor_digest": record.metadata.get("cursor_digest"),
            "saved_at": utc_text(record.saved_at) if record.saved_at > 0 else None,
            "seconds": saved.write_s + saved.commit_s if saved else None,
        }
        row |= {key: getattr(saved, key) if saved else None for key in ("host", "version", "code")}
        row |= {"pinned": record.pin is not None, "note": record.pin or None, "marks": marks}
        rows.append(row | ({"error": record.problem} if record.problem else {}))
    return rows


def cell(row: dict[str, Any], column: str) -> str:
    """One entry of the table."""
    value = row[column]
    if column == "marks":
        return f"UNREADABLE: {row['error']}" if "error" in row else ", ".join(value)
    if column == "pinned":
        return "pinned" if value else ""
    if value is None:
        return "-"
    if column == "saved_at":
        return str(value)[:19] + "Z"
    if column == "val_loss" and row["val_step"] not in (None, row["step"]):
        return f"{value:.4f}@{row['val_step']:.0f}"
    forms = {"loss": ".4f", "val_loss": ".4f", "lr": ".3g", "tokens": ",.0f", "bytes": ",", "seconds": ".2f"}
    return format(value, forms.get(column, ""))


def best_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.format.keys import step_folder
    from ckptkit.runs.catalogue import listed_steps
    from ckptkit.runs.record import Records
    from ckptkit.runs.retention import ranked

    storage = open_run(arguments.run, "ckptkit best {}")
    records = Records(storage)
    found = [record for record in records.of(listed_steps(storage)) if record.is_readable]
    check_metric(found, arguments.metric, storage)
    for record in ranked(found, arguments.metric, "max" if arguments.max else "min"):
        problem = records.checked(record).problem
        url = f"{storage.url}/{step_folder(record.step)}"
        if problem:
            log(f"passed over {url}: {problem}")
            continue
        value = record.metrics()[arguments.metric]
        if arguments.json:
            print_json({"url": url, "step": record.step, "metric": arguments.metric, "value": value})
        else:
            print_line(url)
        return EXIT_OK
    raise UserError(f"no step of {storage.url} with {arguments.metric} is whole", hint=f"ckptkit ls {storage.url}")


def check_metric(found: "Sequence[StepRecord]", metric: str, storage: "Storage") -> None:
    """Refuse a metric that no step has, with those that there are."""
    from ckptkit.runs.catalogue import no_step

    if not found:
        raise no_step(storage)
    names = sorted({name for record in found for name in record.metrics()}, key=lambda name: (name.count("."), name))
    if metric not in names:
        there = ", ".join(names[:MAX_NAMED]) + (", ..." if names[MAX_NAMED:] else "") if names else "none"
        hint = f"--metric {names[0]}" if names else "record numbers in the metadata of saves"
        raise UserError(f"no step of {storage.url} has the metric {metric}; there are: {there}", hint=hint)


def pin_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.runs.catalogue import resolve
    from ckptkit.runs.pins import pin

    def act(storage: "Storage", step: int) -> bool:
        pin(storage, step, arguments.note)
        return True

    return each_step(arguments, "pinned", resolve, act)


def unpin_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.format.address import open_address
    from ckptkit.runs.pins import unpin

    return each_step(arguments, "unpinned", open_address, unpin)  # also of a step whose root is gone


def each_step(
    arguments: argparse.Namespace,
    done: str,
    find: "Callable[[str], tuple[Storage, int | None]]",
    act: "Callable[[Storage, int], bool]",
) -> int:
    """Find the steps that URLs name, all before the first is changed, act on each, and report to which it was done."""
    from ckptkit.format.address import open_address
    from ckptkit.format.keys import step_folder

    for url in arguments.steps:
        if open_address(url)[1] is None:
            raise UserError(f"{url} is not the URL of a step", hint=f"choose one: ckptkit ls {url}")
    addresses = [(storage, step) for storage, step in map(find, arguments.steps) if step is not None]
    urls = []
    for storage, step in addresses:
        url = f"{storage.url}/{step_folder(step)}"
        if act(storage, step):
            urls.append(url)
        else:
            log(f"{url} was not {done.removeprefix('un')}")
    if arguments.json:
        print_json({done: urls})
    else:
        for url in urls:
            print_line(f"{done} {url}")
    return EXIT_OK


def prune_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.runs.catalogue import listed_steps, missing_place, no_step
    from ckptkit.runs.debris import abort_uploads
    from ckptkit.runs.pruning import prune
    from ckptkit.runs.record import Records
    from ckptkit.runs.retention import Retention

    storage = open_run(arguments.run, "ckptkit prune {} --dry-run")
    policy = Retention(
        arguments.keep_last, arguments.keep_every, arguments.keep_best, arguments.keep_hourly,
        arguments.metric, "max" if arguments.max else "min",
    )  # fmt: skip
    listed, records = listed_steps(storage), Records(storage)
    if not listed and missing_place(storage):
        raise no_step(storage)
    found = records.of(listed)
    if not found:
        log(f"no committed step in {arguments.run}")
    good = [record for record in found if record.is_good]
    if policy.keep_best and good:  # of a misspelt metric nothing would be best
        check_metric(good, policy.metric, storage)
    age_s = getattr(arguments, "orphans_older_than", None)
    report = prune(
        storage, policy, listed=listed, records=records, orphans_older_than_s=age_s, dry_run=arguments.dry_run
    )
    try:
        report.uploads = abort_uploads(storage, age_s, dry_run=arguments.dry_run)
    except UserError as error:  # what was deleted is reported all the same
        log(f"warning: unfinished uploads are left: {error.message}")
    if arguments.json:
        print_json(asdict(report))
    else:
        print_report(report)
    return EXIT_OK


def print_report(report: "PruneReport") -> None:
    """Print what a prune deleted, or would delete, and why the other steps stay."""
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
