"""`ckptkit rm`: delete steps by name."""

from dataclasses import dataclass

from ckptkit.commands.shared import OfSteps, print_deleted, step_named
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfSteps):
    """Options of `ckptkit rm`."""

    newest_too: bool = option(False, "also the newest good step, or the only one")
    dry_run: bool = option(False, "say what would go, delete nothing")


def run(options: Options) -> int:
    """Delete committed steps of one run, roots first, as prune does. Pinned steps are refused, and the newest good step
    without --newest-too; then nothing goes. Files that are not of the checkpoint format are left alone.
    """
    named = [step_named(url) for url in options.steps]
    run, steps = named[0], [each.resolve() for each in named]
    for other in named:
        if other.storage.address != run.storage.address:
            raise UserError(f"{other.url} is another run than {run.url}", hint="remove the steps of one run at a time")
    report = run.remove(*steps, newest_too=options.newest_too, dry_run=options.dry_run)
    print_deleted(report, as_json=options.json)
    return EXIT_CHECK_FAILED if report.kept else EXIT_OK
