"""`ckptkit best`: print the URL of the step with the best metric."""

from dataclasses import dataclass
from shlex import quote

from ckptkit.commands.shared import ByMetric, OfRun, check_metric, open_run
from threefold.cli import log, print_json, print_line
from threefold.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options(ByMetric, OfRun):
    """Options of `ckptkit best`."""


def run(options: Options) -> None:
    """Print the URL of the step whose metric is smallest, or largest with --max; of equal ones the newest. A metric is
    a number in the metadata of the root, dotted if it is deeper: config.optim.lr.
    """
    from ckptkit.format.keys import step_folder
    from ckptkit.runs.catalogue import listed_steps
    from ckptkit.runs.record import Records
    from ckptkit.runs.retention import ranked

    storage = open_run(options.run, "ckptkit best {}")
    records = Records(storage)
    readable = [record for record in records.of(listed_steps(storage)) if record.is_readable]
    check_metric(readable, options.metric, storage)
    for record in ranked(readable, options.metric, options.mode):
        problem = records.checked(record).problem
        url = f"{storage.url}/{step_folder(record.step)}"
        if problem:
            log(f"passed over {url}: {problem}")
            continue
        value = record.metrics()[options.metric]
        if options.json:
            print_json({"url": url, "step": record.step, "metric": options.metric, "value": value})
        else:
            print_line(url)
        return
    raise UserError(f"no step of {storage.url} with {options.metric} is whole", hint=f"ckptkit ls {quote(storage.url)}")
