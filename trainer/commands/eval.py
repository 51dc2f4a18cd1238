"""`trainer eval`: loss and perplexity of a checkpoint on its validation sets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.errors import EXIT_OK, StorageError, UserError, quoted
from threefold.needs import GIVEN, unmet
from threefold.options import option, raise_faults
from threefold.packages import require
from trainer.commands.shared import OfCheckpoint, before_ranks, is_first_rank, world_size
from trainer.job.failure import recorded

PLAIN = "data.valid"
TASKS, NO_TASKS = {"tasks": GIVEN}, {"an evaluation without tasks": lambda options: not options.tasks}


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `trainer eval`."""

    by: Literal["store", "tag"] | None = option(
        None,
        "a loss of each store too, or of each tag that `datakit preprocess --tag` gave to documents",
        needs=NO_TASKS,
    )
    set: tuple[str, ...] = option(
        (),
        "evaluate this set of [[data.valid_sets]] alone; may be repeated",
        metavar="NAME",
        repeats=True,
        needs=NO_TASKS,
    )
    tasks: tuple[str, ...] = option((), "tasks of lm-eval, in place of validation sets", metavar="NAME,...")
    tasks_path: str = option("", "a folder with tasks of your own, a YAML file each", needs=TASKS, metavar="FOLDER")
    limit: int = option(0, "the first N items of each task; 0 takes all", minimum=0, needs=TASKS, metavar="N")
    num_fewshot: int | None = option(
        None, "examples before each item; without it as the task says", minimum=0, needs=TASKS, metavar="N"
    )
    batch_size: int = option(16, "rows that are read at once for tasks", minimum=1, needs=TASKS, metavar="N")
    output: str = option("", "write all that lm-eval found, each item too", needs=TASKS, metavar="FILE.json")
    json: bool = option(False, "print one JSON document")


@recorded
def run(options: Options) -> int:
    """Evaluate a checkpoint of any layout on the fixed samples of [data.valid] and of each [[data.valid_sets]], or with
    --tasks by lm-eval."""
    before_ranks(lambda: raise_faults("trainer eval", unmet(options), hint="--tasks NAME asks lm-eval"))
    if options.tasks:
        return run_tasks(options)
    from trainer.run.evaluate import evaluate_checkpoint
    from trainer.run.inference import open_checkpoint

    checkpoint = before_ranks(
        lambda: open_checkpoint(options.checkpoint, options.config, options.flags, world_size=world_size())
    )
    result = evaluate_checkpoint(checkpoint, options.by, options.set)
    if options.json and is_first_rank():
        print_json(result)
    elif is_first_rank():
        print_result(result, options.by)
    return EXIT_OK


def run_tasks(options: Options) -> int:
    """Evaluate a checkpoint on tasks of lm-eval."""
    before_ranks(lambda: require_output(options.output))
    from trainer.run.inference import open_checkpoint
    from trainer.run.tasks import WHAT, Asked, evaluate_tasks

    asked = Asked(options.tasks, options.tasks_path, options.limit, options.num_fewshot, options.batch_size)
    before_ranks(lambda: require("lm_eval", WHAT))
    checkpoint = before_ranks(
        lambda: open_checkpoint(options.checkpoint, options.config, options.flags, world_size=world_size())
    )
    results = evaluate_tasks(checkpoint, asked)
    if not is_first_rank():
        return EXIT_OK
    if options.output:
        write_output(options.output, results)
    if options.json:
        names = "step", "results", "groups", "n-samples", "n-shot", "versions"
        print_json({name: results[name] for name in names if name in results})
    else:
        print_line(f"step: {results['step']}")
        print_table(("task", "metric", "value", "stderr", "items"), list(task_rows(results)), left={"task", "metric"})
    return EXIT_OK


def require_output(path: str) -> None:
    """Raise UserError if the folder of a file is missing, before anything is computed."""
    if path and not Path(path).absolute().parent.is_dir():
        folder = Path(path).absolute().parent
        raise UserError(f"cannot write {path}: the folder {folder} is missing", hint=f"mkdir -p {quoted(str(folder))}")


def write_output(path: str, results: dict[str, Any]) -> None:
    """Write results and items as one JSON document."""
    try:
        Path(path).write_text(json.dumps(results, indent=1, default=str, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def task_rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each metric of each task: of `acc,none` the value, and its error `acc_stderr,none`."""
    for task, values in results["results"].items():
        for key, value in values.items():
            name, _, filtered = key.partition(",")
            if name.endswith("_stderr") or not isinstance(value, int | float) or not filtered:
                continue
            error = values.get(f"{name}_stderr,{filtered}")
            label = name if filtered == "none" else f"{name} ({filtered})"
            texts = [digits(number) if isinstance(number, int | float) else "-" for number in (value, error)]
            items = results.get("n-samples", {}).get(task, {}).get("effective", "")
            yield [task, label, *texts, str(items)]


def digits(number: float) -> str:
    """Return a number with four digits behind the point, or as a power of ten if it is large."""
    return f"{number:.4f}" if abs(number) < 1e6 else f"{number:.4e}"


def print_result(result: dict[str, Any], by: str | None) -> None:
    """Print what was measured, a line each, and then a table of the sets and of the groups of each."""
    sets = result.get("sets", {})
    for name, value in result.items():
        if name not in ("sets", f"by_{by}"):
            print_line(f"{name}: {value}")
    rows = [row for name, measured in {PLAIN: result, **sets}.items() for row in rows_of(name, measured, by)]
    if rows:
        names = ["set"] * bool(sets) + ([by] if by else [])
        first = 0 if sets else 1
        print_table((*names, "loss", "perplexity", "tokens"), [row[first:] for row in rows], left=set(names))


def rows_of(name: str, measured: dict[str, Any], by: str | None) -> Iterator[list[str]]:
    """Yield the rows of a set's table: the whole set if it is not above, and each group."""
    if name != PLAIN:
        yield [name, *[""] * bool(by), *numbers(measured)]
    for group in measured.get(f"by_{by}", ()):
        yield [name, group[by], *numbers(group)]


def numbers(measured: dict[str, Any]) -> list[str]:
    """Return loss, perplexity and tokens as texts; a dash for what no token was measured on."""
    loss, perplexity = (measured[name] for name in ("loss", "perplexity"))
    texts = ["-", "-"] if loss is None else [f"{loss:.4f}", f"{perplexity:,.2f}"]
    return [*texts, f"{measured['num_tokens']:,}"]
