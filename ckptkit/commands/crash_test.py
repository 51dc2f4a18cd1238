"""`ckptkit crash-test`: try what saves rely on at a place."""

from dataclasses import asdict, dataclass

from ckptkit.commands.shared import Reporting
from threefold.cli import log, print_json, print_line
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit crash-test`."""

    place: str = argument("URL", "folder or bucket where runs are to be saved: a path, s3://..., or any fsspec URL")
    races: int = option(20, "races of two processes for one key", minimum=1, maximum=10_000, metavar="N")
    kills: int = option(8, "kills of a process that saves", minimum=1, maximum=10_000, metavar="N")
    size_mib: int = option(
        16, "MiB of a step; twice as many steps as kills are written", minimum=1, maximum=1 << 20, metavar="N"
    )


def run(options: Options) -> int:
    """Try what a save relies on at a folder or bucket: that a key is written once and only once, that writes are read
    and listed at once, that a kill leaves each step whole or absent. It works in a new folder there, and removes it.
    """
    from ckptkit.check.crash_test import MIB, NOT_PROVED, PROVED, Effort, crash_test

    effort = Effort(options.races, options.kills, options.size_mib * MIB)
    outcomes = []
    for outcome in crash_test(options.place, effort):
        outcomes.append(outcome)
        if not options.json:
            print_line(f"{'ok' if outcome.ok else 'failed':<6}  {outcome.name}: {outcome.what}")
            if outcome.hint:
                print_line(f"        hint: {outcome.hint}")
    num_failed = sum(not outcome.ok for outcome in outcomes)
    if options.json:
        ends = [asdict(outcome) for outcome in outcomes]
        report = {"url": options.place, "ok": not num_failed, "trials": ends}
        print_json(report | {"proved": PROVED, "not_proved": NOT_PROVED})
    else:
        print_line(f"{options.place}: {len(outcomes)} trials, {num_failed} failed")
        log(f"proved: {PROVED}")
        for text in NOT_PROVED:
            log(f"not proved: {text}")
    return EXIT_CHECK_FAILED if num_failed else EXIT_OK
