"""`ckptkit copy`: copy a checkpoint to another storage."""

from dataclasses import asdict, dataclass

from ckptkit.commands.shared import CKPT_HELP, Reporting, pointing_to_other_steps, share_of_run, shown_bytes
from threefold.cli import print_json, print_line, report
from threefold.errors import EXIT_OK, CheckFailed, UserError
from threefold.options import argument, option


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `ckptkit copy`."""

    source: str = argument("SRC", CKPT_HELP)
    target: str = argument("DST", "run URL; the step keeps its number")
    all: bool = option(False, "copy all committed steps of a run, oldest first")
    verify: bool = option(False, "read every byte of the copy back before it is committed")
    dry_run: bool = option(False, "say what would be copied, write nothing")


def run(options: Options) -> int:
    """Copy a committed step between any two storages, byte for byte, every byte verified on the way; the copy is
    committed last. The same command continues a copy that was killed.
    """
    from ckptkit.format.address import open_target
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.rewrite.copy import FILES_AT_ONCE, UPLOAD_MEMORY_BYTES, copy_step
    from ckptkit.runs.run import Run

    return_large_frees()
    source = Run(options.source)
    steps = [source.resolve()]
    if options.all:
        if source.named is not None:
            raise UserError(f"--all copies a run, {options.source} is one step", hint="leave --all out")
        steps = source.steps()
    target, target_step = open_target(options.target, write_memory_bytes=UPLOAD_MEMORY_BYTES // FILES_AT_ONCE)
    if target_step not in (None, *steps) or (target_step is not None and options.all):
        raise UserError(f"a copy keeps its number: {options.target} names another step", hint=f"copy to {target.url}")
    reports, code = [], EXIT_OK
    for step in steps:
        try:
            with source.open(step) as reader, shown_bytes() as progress:
                done = copy_step(reader, target, verify=options.verify, progress=progress, dry_run=options.dry_run)
        except CheckFailed as damage:
            if not options.all:
                raise pointing_to_other_steps(damage, source) from damage
            report(damage)  # the other steps are worth copying all the more
            code = damage.exit_code
            continue
        reports.append(asdict(done))
        if not options.json:
            did = "bytes would be copied" if done.dry_run else f"bytes copied in {done.seconds:.1f} s"
            print_line(
                f"{done.target}: {done.num_files} files, {done.bytes_copied:,} {did}"
                + (f", {done.bytes_kept:,} were there" if done.bytes_kept else "")
                + (", equal to what was saved" if done.certified else "")
                + ("" if options.all else share_of_run(options.source, "copies"))
            )
    if options.json:
        print_json(reports)
    return code
