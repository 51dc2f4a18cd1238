"""`trainer verify`: prove on a CPU that a layout changes no number of a run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from threefold.cli import print_json, print_line
from threefold.console import log
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.flags import Settings, settings
from threefold.options import argument, option
from trainer.commands.shared import ELSEWHERE, check_places, of_layout, write_json
from trainer.config import Config
from trainer.config.foreign.translate import translated

if TYPE_CHECKING:
    from trainer.verify.faults.fault import Fault
    from trainer.verify.result import Result
    from trainer.verify.shrink import Shrunk


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer verify`."""

    config: tuple[str, ...] = argument(
        "CONFIG.toml|RUN",
        "configuration, or a run, whose newest step is restored too; with --faults names of faults",
        (),
    )
    from_megatron: str = option("", "verify what a command line of Megatron-LM says, or its script", metavar="COMMAND")
    layout: str = option("", "verify another layout than the configuration's", metavar="tp2-pp2-dp2")
    device: Literal["cpu", "cuda"] = option(
        "cpu", "cuda: hold ops and precision at true width to float64 on a GPU too, in one layer of each kind"
    )
    seconds: float = option(60.0, "begin no check after so many seconds", above=0)
    all: bool = option(False, "up to 256 ranks, where otherwise axes are shortened to 64")
    allow_partial: bool = option(False, "exit with 0 though a check was not run")
    seeds: str = option("", "run the layout in orders drawn from these seeds, and compare bits", metavar="FIRST-LAST")
    faults: bool = option(False, "plant each named fault in a small run, and say whether its check finds it")
    list: bool = option(False, "with --faults: print them, and plant none")
    json: str = option("", "write the card as JSON; - prints it", metavar="FILE")
    html: str = option("", "write the card as a page; needs threefold[plot]", metavar="FILE")
    flags: Settings = settings(Config, hidden=ELSEWHERE, foreign=translated)


def run(options: Options) -> int:
    """Train a small run of the same cuts on ranks that are threads, beside one process in float64: losses, norms,
    weights, samples, resumes, reshards, schedules and precision. Needs no GPU and no store; with --device cuda layers
    of true width are checked on a GPU before. Exit code 1 if a check failed, or was not run. With --faults each named
    fault is planted instead: exit code 1 if its check misses one. With --seeds the layout runs in drawn orders: exit
    code 1 if one has other bits, or a rare situation never came up."""
    if options.faults or options.list:
        return run_faults(options)
    from threefold.page import write_page
    from trainer.config.resolve import layout_of
    from trainer.verify.bench import Bench
    from trainer.verify.beside import run_checks
    from trainer.verify.card import card, page, verdict_of
    from trainer.verify.device_checks import device_of, device_results
    from trainer.verify.locate import located
    from trainer.verify.shrink import shrunk
    from trainer.verify.source import open_run_or_file

    deadline, max_ranks = perf_counter() + options.seconds, 256 if options.all else 64
    if len(options.config) + bool(options.from_megatron) != 1:
        raise UserError("one of CONFIG.toml, RUN and --from-megatron COMMAND is verified", hint="trainer verify --help")
    check_places(options.json, options.html)
    name = "".join(options.config)
    flags = {**options.flags, **of_layout(options.layout, options.flags)}
    device = device_of(options.device)
    source = open_run_or_file(name, flags, megatron=options.from_megatron)
    config = source.config
    small = shrunk(config, max_ranks=max_ranks)
    log(f"verifying {source.name} as {layout_of(small.config)}, {small.config.model.num_layers} layers")
    if options.seeds:
        return run_seeds(options, small, config, deadline)
    results: list[Result] = []
    wide: Shrunk | None = None
    if options.device != "cpu":
        wide, of_device = device_results(config, device, deadline)
        for result in of_device:
            results.append(result)
            (log if options.json == "-" else print_line)(row_of(result))
    with TemporaryDirectory(prefix="trainer-verify-") as folder:
        bench = Bench(small, config, Path(folder), source.start)
        for result in run_checks(bench, deadline):
            if result.state == "FAILED":
                result = located(result, bench, deadline=deadline, max_ranks=max_ranks)
            results.append(result)
            (log if options.json == "-" else print_line)(row_of(result))
    verdict = verdict_of(results)
    for change in small.changes:
        log(f"  {change}")
    for change in wide.changes if wide is not None else ():
        log(f"  at true width: {change}")
    log(f"the options above are otherwise in the small run; {len(results)} checks: {verdict}")
    known = card(source.name, config, small, results, wide)
    write_json(options.json, known)
    if options.html:
        write_page(page(known), options.html)
    return EXIT_OK if verdict == "ok" or (verdict == "partial" and options.allow_partial) else EXIT_CHECK_FAILED


def run_seeds(options: Options, small: "Shrunk", run: Config, deadline: float) -> int:
    """Run a range of seeds until the deadline, and add what they came to to the report that is there."""
    from trainer.verify.bench import Bench
    from trainer.verify.seeds import try_seed
    from trainer.verify.tally import Tally, range_of

    if options.html or options.device != "cpu":
        name = "--html" if options.html else "--device"
        raise UserError(f"{name} is of the checks, and has no effect on --seeds", hint="trainer verify --help")
    (first, last), results = range_of(options.seeds), []
    tally = Tally.read(options.json, small.config)
    tally.refuse_again(first, last)
    with TemporaryDirectory(prefix="trainer-verify-") as folder:
        bench = Bench(small, run, Path(folder))
        for seed in range(first, last + 1):
            if perf_counter() >= deadline:
                break
            results.append(try_seed(bench, seed))
            if results[-1].text:
                (log if options.json == "-" else print_line)(f"FAILED  seed {seed}: {results[-1].text}")
    tally = tally.added(results)
    for name, number in tally.situations.items() if options.json != "-" else ():
        print_line(f"{number:>10,}  {name}")
    write_json(options.json, tally.to_json())
    is_whole = len(results) == last - first + 1 and not tally.never
    rest = "" if len(results) == last - first + 1 else f"; time was over before seed {first + len(results)}"
    log(f"{tally.num_seeds:,} seeds, {len(tally.failed)} with other bits or an error{rest}")
    return EXIT_OK if not tally.failed and (is_whole or options.allow_partial) else EXIT_CHECK_FAILED


def run_faults(options: Options) -> int:
    """Plant named faults, all or those that are named, and report which of them their checks find."""
    from trainer.verify.faults.named import faults_named
    from trainer.verify.faults.search import look_for

    check_fault_options(options)
    faults, deadline = faults_named(options.config), perf_counter() + options.seconds
    if options.list:
        rows = [of_fault(fault) for fault in faults]
        if options.json == "-":
            print_json(rows)
        for row in rows if options.json != "-" else ():
            print_line(
                f"{row['name']:<30}  {row['check']:<28}  {row['text']}" + f" ({row['peer']})" * bool(row["peer"])
            )
        return EXIT_OK
    findings = []
    for fault, finding in zip(faults, look_for(faults, deadline), strict=True):
        findings.append(of_fault(fault) | asdict(finding))
        line = f"{finding.state:<9}  {finding.name:<30}  {finding.check:<28}"
        shown = "" if finding.state == "found" else f"  {finding.reason}"
        (log if options.json == "-" else print_line)(f"{line}{shown} ({finding.seconds:.1f} s)")
    states = [finding["state"] for finding in findings]
    log(f"{states.count('found')} of {len(states)} faults are found, {states.count('not run')} were not planted")
    write_json(options.json, findings)
    is_well = "NOT FOUND" not in states and ("not run" not in states or options.allow_partial)
    return EXIT_OK if is_well else EXIT_CHECK_FAILED


def check_fault_options(options: Options) -> None:
    """Raise UserError for an option that has no effect on faults, whose small runs are their own."""
    if not options.faults:
        raise UserError("--list is of named faults", hint="trainer verify --faults --list")
    idle = [f"--{name}" for name in ("layout", "html", "all", "seeds") if getattr(options, name)]
    idle += ["--from-megatron"] if options.from_megatron else []
    idle += ["--device"] if options.device != "cpu" else []
    idle += [given.flag for given in options.flags.values()]
    if idle:
        raise UserError(
            f"{idle[0]} has no effect on --faults: each is planted in a small run of its own", hint="--faults"
        )
    check_places(options.json, options.html)


def of_fault(fault: "Fault") -> dict[str, str]:
    """Return what is known of a fault before it is planted."""
    layout = str(fault.layout or "one process")
    return {"name": fault.name, "text": fault.text, "layout": layout, "check": fault.seen_by, "peer": fault.peer}


def row_of(result: "Result") -> str:
    """Return the line of a check: its verdict, what it found and allows, and what differs."""
    figures = f"{result.difference}, allowed {result.bound}" if result.difference else ""
    texts = [text for text in (figures, result.text) if text]
    return f"{result.state:<10}  {result.name:<28}  {'; '.join(texts)} ({result.seconds:.1f} s)"
