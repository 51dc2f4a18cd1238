"""`ckptkit verify`: check every byte of a checkpoint."""

from dataclasses import asdict, dataclass

from ckptkit.commands.shared import OfCheckpoint, opened
from threefold.cli import print_json, print_line
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from threefold.options import option


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
    from ckptkit.check.verify import verify_checkpoint

    with opened(options.source) as reader:
        if not reader.root.parts:  # a folder of another program
            text = f"{reader.url} has no checksums that could be compared"
            raise UserError(text, hint="import it first: ckptkit import --help")
        read = 0.0 if options.manifest else options.sample or 1.0
        result = verify_checkpoint(reader, share=read, seed=options.seed)
    if options.json:
        print_json({"ok": result.ok, "url": reader.url} | asdict(result))
    else:
        for fault in result.faults:
            print_line(str(fault))
        print_line(
            f"{reader.url}: {result.num_files} files, {result.bytes_read:,} of {result.data_bytes:,} bytes read, "
            + ("no fault" if result.ok else f"{len(result.faults)} fault{'s' if len(result.faults) > 1 else ''}")
            + (f", {result.num_certified:,} tensors equal to what was saved" if result.num_certified else "")
        )
    return EXIT_OK if result.ok else EXIT_CHECK_FAILED
