"""`ckptkit ls`: list a run's committed steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckptkit.commands.shared import Reporting
from threefold.cli import log, print_json
from threefold.console import print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK
from threefold.options import argument, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptkit.runs.record import StepRecord

Key = Literal["step", "tokens", "loss", "val_loss", "lr", "layout", "bytes", "saved_at", "seconds"]
COLUMNS = (*get_args(Key), "pinned", "marks")
FORMS = {"loss": ".4f", "val_loss": ".4f", "lr": ".3g", "tokens": ",.0f", "bytes": ",", "seconds": ".2f"}


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit ls`."""

    run: str = argument("RUN", "run URL, or step URL: a path, s3://..., or any fsspec URL")
    sort: Key = option("step", f"sort by {', '.join(get_args(Key))}", metavar="KEY")


def run(options: Options) -> int:
    """List a run's committed steps with what their roots record. A root that is damaged is named in its row, and the
    exit code is 1.
    """
    from ckptkit.format.address import open_address
    from ckptkit.runs.catalogue import listed_steps, look_up, missing_place, no_step, not_a_run
    from ckptkit.runs.record import Records

    storage, step = open_address(options.run)
    records = Records(storage).of(listed_steps(storage) if step is None else [look_up(storage, step)])
    if not records and (step is not None or missing_place(storage) or not_a_run(storage)):
        raise no_step(storage, step)
    rows = ls_rows(records, storage.url, is_run=step is None)
    rows.sort(key=lambda row: (row[options.sort] is None, row[options.sort]))
    if options.json:
        print_json(rows)
    elif rows:
        print_table(COLUMNS, [[cell(row, column) for column in COLUMNS] for row in rows], left={"layout", "marks"})
    else:
        log(f"no committed step in {options.run}")
    return EXIT_CHECK_FAILED if any("error" in row for row in rows) else EXIT_OK


def ls_rows(records: "Sequence[StepRecord]", url: str, *, is_run: bool) -> list[dict[str, Any]]:
    """Return a row for each record: the columns of the table, None where there is nothing to show, more for --json.

    Steps are marked only where all of a run are listed, among which one is the newest and one the best.
    """
    from ckptkit.format.keys import step_folder
    from ckptkit.format.saved import utc_text
    from ckptkit.runs.retention import ranked

    marked = {"newest": records[-1:], "best": ranked(records, "val_loss", "min")[:1]} if is_run else {}
    rows = []
    for record in records:
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
    """Return one entry of the table."""
    value = row[column]
    match column:
        case "marks":
            return f"UNREADABLE: {row['error']}" if "error" in row else ", ".join(value)
        case "pinned":
            return "pinned" if value else ""
        case _ if value is None:
            return "-"
        case "saved_at":
            return str(value)[:19] + "Z"
        case "val_loss" if row["val_step"] not in (None, row["step"]):
            return f"{value:.4f}@{row['val_step']:.0f}"
        case _:
            return format(value, FORMS.get(column, ""))
