"""`ckptkit hash`: hash a checkpoint's contents, whatever its layout."""

from dataclasses import asdict, dataclass

from ckptkit.commands.shared import OfCheckpoint, opened
from threefold.cli import print_json, print_line
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `ckptkit hash`."""

    tensors: bool = option(False, "print the hash of every tensor too")


def run(options: Options) -> None:
    """Print hashes of a checkpoint's tensors, the same for any layout it is stored in."""
    from ckptkit.check.hash import hash_checkpoint

    with opened(options.source) as reader:
        hashes = hash_checkpoint(reader)
    if options.json:
        print_json({"url": reader.url, "step": reader.root.step} | asdict(hashes))
        return
    for name, digest in hashes.tensors.items() if options.tensors else ():
        print_line(f"{digest}  {name}")
    for total in ("params", "optim", "all"):
        print_line(f"{getattr(hashes, total)}  {total}")
