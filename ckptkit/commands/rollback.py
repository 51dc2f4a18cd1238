"""`ckptkit rollback`: make an older step the newest."""

from dataclasses import asdict, dataclass

from ckptkit.commands.shared import Reporting, step_named
from threefold.cli import print_json, print_line
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit rollback`."""

    step: str = argument("STEP_URL", "step URL, such as runs/a/step-000000100")
    undo: bool = option(False, "bring the steps after this one back that were set aside")
    dry_run: bool = option(False, "say which steps would be set aside or come back, change nothing")


def run(options: Options) -> int:
    """Set all steps after one aside, so that the run goes on from that step; end the job that saves there first. Pinned
    steps are refused. What is set aside can be brought back with --undo, until a sweep of prune takes it: a day after
    the rollback, once the run was saved past it. The same command continues a rollback that was killed.
    """
    run = step_named(options.step)
    assert run.named is not None, "the URL of a step"
    work = run.undo_rollback if options.undo else run.rollback
    report = work(run.named, dry_run=options.dry_run)
    if options.json:
        print_json(asdict(report))
    else:
        would = "would be " if options.dry_run else ""
        rows = dict.fromkeys(report.set_aside, f"{would}set aside")
        rows |= dict.fromkeys(report.quarantined, f"{would}put in quarantine: its root is damaged")
        rows |= dict.fromkeys(report.brought_back, f"{would}brought back")
        rows |= {step: f"left aside: {why}" for step, why in report.left.items()}
        for step in sorted(rows):
            print_line(f"{step:>10}  {rows[step]}")
        num_steps = len(report.brought_back if options.undo else report.set_aside + report.quarantined)
        did = "brought back" if options.undo else "set aside"
        print_line(f"{report.url}: {num_steps} steps after step {report.step} {would}{did}")
    return EXIT_CHECK_FAILED if report.left else EXIT_OK
