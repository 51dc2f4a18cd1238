"""`ckptkit verify`: check every byte of a checkpoint."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ckptkit.commands.shared import OfCheckpoint, for_each_step, opened, share_of_run, whole_run
from threefold.cli import print_json, print_line
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.options import option

if TYPE_CHECKING:
    from ckptkit.check.verify import Verification
    from ckptkit.loading.chunk_source import RewriteSource
    from ckptkit.loading.reader import CheckpointReader


def share(text: str) -> float:
    """Return the share of a file that is read."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is not a share above 0, up to 1")
    return value


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `ckptkit verify`."""

    all: bool = option(False, "check all committed steps of a run, oldest first, each as far as the other flags say")
    sample: float | None = option(
        None,
        "read a random share of each data file only, 0.05 for a twentieth, its first and last 1 MiB included",
        metavar="SHARE",
        parse=share,
        exclusive="extent",
    )
    manifest: bool = option(
        False, "read root and indexes only, and look at the sizes of the data files", exclusive="extent"
    )
    seed: int = option(0, "which sample", minimum=0, metavar="N")


def run(options: Options) -> int:
    """Read every byte of a checkpoint (or a sample), check it against its checksums, and name the file, the offset and
    the tensors of all damage (then the exit code is 1).
    """
    if options.all:
        return verify_all(options)
    with opened(options.source) as source:
        result = verified(source, options)
    if options.json:
        print_json(as_json(result, source.url))
    else:
        print_result(result, source.url, share_of_run(options.source, "checks"))
    return EXIT_OK if result.ok else EXIT_CHECK_FAILED


def verify_all(options: Options) -> int:
    """Verify each step of a run, and report on all of them together."""
    source = whole_run(options.source, "checks")
    results: dict[str, Verification] = {}

    def act(reader: "CheckpointReader") -> None:
        result = results[reader.url] = verified(reader, options)
        if not options.json:
            print_result(result, reader.url)

    unreadable = for_each_step(source, act)
    num_bad = len(unreadable) + sum(not result.ok for result in results.values())
    if options.json:
        steps = [as_json(result, url) for url, result in results.items()]
        print_json({"ok": not num_bad, "url": source.storage.url, "steps": steps, "unreadable": unreadable})
    else:
        outcome = f"{num_bad:,} with faults" if num_bad else "no fault"
        print_line(f"{source.storage.url}: {len(results) + len(unreadable):,} steps, {outcome}")
    return EXIT_CHECK_FAILED if num_bad else EXIT_OK


def verified(source: "RewriteSource", options: Options) -> "Verification":
    """Return what is wrong with one checkpoint; another program's, which has no checksums, is refused."""
    from ckptkit.check.verify import verify_checkpoint
    from ckptkit.loading.reader import CheckpointReader

    if not isinstance(source, CheckpointReader):
        text = f"{source.url} has no checksums that could be compared"
        raise UserError(text, hint="import it first: ckptkit import --help")
    read = 0.0 if options.manifest else options.sample or 1.0
    return verify_checkpoint(source, share=read, seed=options.seed)


def as_json(result: "Verification", url: str) -> dict[str, object]:
    """Return the report on one checkpoint as JSON holds it."""
    return {"ok": result.ok, "url": url} | asdict(result)


def print_result(result: "Verification", url: str, end: str = "") -> None:
    """Print the faults of one checkpoint, then a line on what was read of it."""
    for fault in result.faults:
        print_line(str(fault))
    print_line(
        f"{url}: {result.num_files} files, {result.bytes_read:,} of {result.data_bytes:,} bytes read, "
        + ("no fault" if result.ok else f"{len(result.faults)} fault{'s' if len(result.faults) > 1 else ''}")
        + (f", {result.num_certified:,} tensors equal to what was saved" if result.num_certified else "")
        + end
    )
