"""The verbs on the steps of a run: ls, best, pin, unpin, prune. numpy is imported by the verbs, never for --help."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.verb import Verbs, add_verb, whole_number
from threefold.cli import Parser, log, print_json
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError

if TYPE_CHECKING:
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
        ("every", "keep each step that N divides"),
        ("best", "keep the N steps with the best metric"),
        ("hourly", "keep the newest step of each of the last N hours that have one"),
    ):
        prune.add_argument(f"--keep-{name}", type=whole_number(0), default=0, metavar="N", help=what)
    add_metric(prune)
    prune.add_argument(
        "--orphans-older-than",
        type=duration,
        default="24h",
        metavar="AGE",
        help="delete files of uncommitted saves that are at least so old, such as 90m, 24h or 7d",
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
    from ckptkit.address import open_address

    storage, step = open_address(url)
    if step is not None:
        raise UserError(f"{url} is one step, not a run", hint=hint.format(storage.url))
    return storage


def ls_verb(arguments: argparse.Namespace) -> int:
    from ckptkit.address import open_address
    from ckptkit.runs.record import Records

    storage, named = open_address(arguments.run)
    found = Records(storage, check_parts=False).read()
    rows = [row for row in ls_rows(found, storage.url) if named in (None, row["step"])]
    rows.sort(key=lambda row: (row[arguments.sort] is None, row[arguments.sort]))
    if arguments.json:
        print_json(rows)
    elif rows:
        print_table(rows)
    else:
        log(f"no committed step in {arguments.run}")
    return EXIT_CHECK_FAILED if any("error" in row for row in rows) else EXIT_OK


def ls_rows(found: "Sequence[StepRecord]", url: str) -> list[dict[str, Any]]:
    """One row a record: the columns of the table, None where there is nothing to show, and more for --json."""
    from ckptkit.format.root import step_folder
    from ckptkit.format.saved import utc_text
    from ckptkit.runs.retention import ranked

    best = ranked(found, "val_loss", "min")[:1]
    rows = []
    for record in found:
        metrics, saved = record.metrics(), record.saved
        marks = ["newest"] * (record is found[-1]) + ["best"] * (record in best)
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


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Columns as wide as their widest entry, numbers to the right; of an unreadable root what is wrong, last."""
    cells = [list(COLUMNS)] + [[cell(row, column) for column in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [text.rjust(width) if name not in ("layout", "marks") else text.ljust(width)
                  for name, text, width in zip(COLUMNS, line, widths, strict=True)]  # fmt: skip
        print("  ".join(padded).rstrip())


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
    from ckptkit.format.root import step_folder
    from ckptkit.loading.reader import read_root
    from ckptkit.runs.record import Records, missing_files
    from ckptkit.runs.retention import ranked

    storage = open_run(arguments.run, "ckptkit best {}")
    found = [record for record in Records(storage, check_parts=False).read() if record.is_readable]
    check_metric(found, arguments.metric, storage)
    for record in ranked(found, arguments.metric, "max" if arguments.max else "min"):
        problem = missing_files(storage, read_root(storage, record.step))
        url = f"{storage.url}/{step_folder(record.step)}"
        if problem:
            log(f"passed over {url}: {problem}")
            continue
        value = record.metrics()[arguments.metric]
        if arguments.json:
            print_json({"url": url, "step": record.step, "metric": arguments.metric, "value": value})
        else:
            print(url)
        return EXIT_OK
    raise UserError(f"no step of {storage.url} with {arguments.metric} is whole", hint=f"ckptkit ls {storage.url}")


def check_metric(found: "Sequence[StepRecord]", metric: str, storage: "Storage") -> None:
    """Refuse a metric that no step has, with those that there are."""
    if not found:
        raise UserError(f"{storage.url} holds no committed step", hint=f"check the URL: ckptkit ls {storage.url}")
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
    from ckptkit.address import open_address
    from ckptkit.runs.pins import unpin

    return each_step(arguments, "unpinned", open_address, unpin)  # also of a step whose root is gone


def each_step(
    arguments: argparse.Namespace,
    done: str,
    find: "Callable[[str], tuple[Storage, int | None]]",
    act: "Callable[[Storage, int], bool]",
) -> int:
    """Find the steps that URLs name, all before the first is changed, act on each, and report to which it was done."""
    from ckptkit.address import open_address
    from ckptkit.format.root import step_folder

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
            print(f"{done} {url}")
    return EXIT_OK


def prune_verb(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ckptkit.runs.pruning import prune
    from ckptkit.runs.record import Records
    from ckptkit.runs.retention import Retention
    from threefold.storage.stale_uploads import abort_stale_uploads

    storage = open_run(arguments.run, "ckptkit prune {} --dry-run")
    policy = Retention(
        arguments.keep_last, arguments.keep_every, arguments.keep_best, arguments.keep_hourly,
        arguments.metric, "max" if arguments.max else "min",
    )  # fmt: skip
    found = Records(storage, check_parts=True).read()
    if not found:
        log(f"no committed step in {arguments.run}")
    good = [record for record in found if record.is_good]
    if policy.keep_best and good:  # of a misspelt metric nothing would be best
        check_metric(good, policy.metric, storage)
    age_s = arguments.orphans_older_than
    report = prune(storage, policy, found=found, orphans_older_than_s=age_s, dry_run=arguments.dry_run)
    if not arguments.dry_run:
        try:
            abort_stale_uploads(storage)
        except UserError as error:  # what was deleted is told all the same
            log(f"warning: unfinished uploads are left: {error.message}")
    if arguments.json:
        print_json(asdict(report))
        return EXIT_OK
    going = "would delete" if report.dry_run else "deleted"
    for number in sorted({*report.deleted, *report.kept}):
        print(f"{number:>10}  " + (going if number in report.deleted else f"kept: {', '.join(report.kept[number])}"))
    for attempt in report.orphans:
        print(f"{going} {attempt}, of a save that was never committed")
    for key in report.left_alone:
        print(f"left alone: {key}")
    print(f"{storage.url}: {going} {len(report.deleted)} steps, {report.num_files:,} files, {report.num_bytes:,} bytes")
    return EXIT_OK
