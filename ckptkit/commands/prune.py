"""`ckptkit prune`: delete steps that no rule keeps."""

import re
from dataclasses import dataclass

from ckptkit.commands.shared import ByMetric, OfRun, check_metric, open_run, print_deleted
from threefold.cli import log
from threefold.errors import UserError
from threefold.options import option

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return the seconds of a text such as 90m, 24h or 7d."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if not match:
        raise ValueError(f"{text!r} is not a time such as 90m, 24h or 7d")
    return float(match[1]) * SECONDS[match[2]]


@dataclass(frozen=True, kw_only=True)
class Options(ByMetric, OfRun):
    """Options of `ckptkit prune`."""

    keep_last: int = option(0, "keep the newest N steps", minimum=0, metavar="N")
    keep_every: int = option(0, "keep the first step at or after each multiple of N", minimum=0, metavar="N")
    keep_best: int = option(0, "keep the N steps with the best metric", minimum=0, metavar="N")
    keep_hourly: int = option(
        0, "keep the newest step of each of the last N hours that have one", minimum=0, metavar="N"
    )
    orphans_older_than: float | None = option(
        None,
        "delete all that uncommitted saves left and that is at least so old, such as 90m, 24h or 7d; 0s may hit a save "
        "that is running. Without it: what is a day old, of steps before the newest committed one",
        metavar="AGE",
        parse=duration,
    )
    dry_run: bool = option(False, "say what would go, delete nothing")


def run(options: Options) -> None:
    """Delete the steps that none of the given rules keeps, and the files of saves that never were committed. Pinned
    steps and the newest good step stay, whatever is asked; without a rule all steps stay. Files that are not of the
    checkpoint format are left alone.
    """
    from ckptkit.runs.catalogue import listed_steps, missing_place, no_step, not_a_run
    from ckptkit.runs.debris import abort_uploads
    from ckptkit.runs.pruning import prune
    from ckptkit.runs.record import Records
    from ckptkit.runs.retention import Retention

    storage = open_run(options.run, "ckptkit prune {} --dry-run")
    policy = Retention(
        options.keep_last, options.keep_every, options.keep_best, options.keep_hourly,
        options.metric, options.mode,
    )  # fmt: skip
    listed, records = listed_steps(storage), Records(storage)
    if not listed and (missing_place(storage) or not_a_run(storage)):
        raise no_step(storage)
    found = records.of(listed)
    if not found:
        log(f"no committed step in {options.run}")
    good = [record for record in found if record.is_good]
    if policy.keep_best and good:  # of a misspelt metric nothing would be best
        check_metric(good, policy.metric, storage)
    age_s = options.orphans_older_than
    report = prune(storage, policy, listed=listed, records=records, orphans_older_than_s=age_s, dry_run=options.dry_run)
    try:
        report.uploads = abort_uploads(storage, age_s, dry_run=options.dry_run)
    except UserError as error:  # what was deleted is reported all the same
        log(f"warning: unfinished uploads are left: {error.message}")
    print_deleted(report, as_json=options.json)
