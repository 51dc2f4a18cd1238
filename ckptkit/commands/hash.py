"""`ckptkit hash`: hash a checkpoint's contents, whatever its layout."""

from dataclasses import dataclass

from ckptkit.commands.shared import OfCheckpoint, pointing_to_other_steps
from threefold.cli import print_json, print_line
from threefold.errors import EXIT_OK
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `ckptkit hash`."""

    tensors: bool = option(False, "print the hash of every tensor too")


@pointing_to_other_steps
def run(options: Options) -> int:
    """Print hashes of a checkpoint's tensors, the same for any layout it is stored in."""
    from dataclasses import asdict

    from ckptkit.check.hash import hash_checkpoint
    from ckptkit.io.blocks import return_large_frees
    from ckptkit.loading.reader import CheckpointReader
    from ckptkit.runs.catalogue import resolve

    return_large_frees()
    storage, step = resolve(options.source)
    with CheckpointReader(storage, step) as reader:
        found = hash_checkpoint(reader)
    if options.json:
        print_json({"url": reader.url, "step": step} | asdict(found))
        return EXIT_OK
    for name, digest in found.tensors.items() if options.tensors else ():
        print_line(f"{digest}  {name}")
    for total in ("params", "optim", "all"):
        print_line(f"{getattr(found, total)}  {total}")
    return EXIT_OK
