"""`datakit where`: list the steps of a run that read a document."""

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from datakit.commands.shared import OfRun
from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.errors import UserError
from threefold.options import option

if TYPE_CHECKING:
    from datakit.stream.blend import Blend
    from datakit.stream.stream_config import RunStream


@dataclass(frozen=True, kw_only=True)
class Options(OfRun):
    """Options of `datakit where`."""

    document: str = option(..., "a store of the run, and a document of it, counted from 0", metavar="STORE:K")


def run(options: Options) -> None:
    """List the steps and samples at which a run read, or will read, a document, up to the run's last step. It is
    computed from configuration and stores alone.
    """
    stream, blend = options.open()
    sources, document = _document(blend, options.document)
    last = stream.num_steps(blend)
    reads = _reads(stream, blend, sources, document, last)
    store = blend.stores[sources[0]]
    num_tokens, origin = len(store.document(document)), store.origin(document)
    if options.json:
        found = {"store": str(store.path), "document": document, "num_tokens": num_tokens, **asdict(origin)}
        print_json({**found, "last_step": last, "reads": reads})
        return
    print_line(
        f"document {document:,} of {store.place}, {num_tokens:,} tokens: {origin.path or 'no source'}, "
        f"line {origin.line:,}, byte {origin.offset_bytes:,}"
    )
    if not reads:
        print(f"no step up to {last:,}, the last one, reads it")
        return
    rows = [
        (f"{read['step']:,}", f"{read['sample']:,}", f"{read['epoch']:,}", f"{read['start']:,} to {read['stop']:,}")
        for read in reads
    ]
    print_table(("step", "sample", "epoch", "tokens"), rows)


def _document(blend: "Blend", asked: str) -> tuple[list[int], int]:
    """Return the numbers of the store in the blend, several if it is named repeatedly, and the document's number."""
    place, _, number = asked.rpartition(":")
    known = [os.path.abspath(store.path) for store in blend.stores]
    sources = [source for source, path in enumerate(known) if place and path == os.path.abspath(place)]
    paths = [str(store.path) for store in blend.stores]
    if not number.isdecimal() or not place:
        raise UserError(f"{asked!r} is not a store and a number", hint=f"--document {paths[0]}:0")
    if not sources:
        raise UserError(
            f"the run does not read the store {place}: its stores are {', '.join(paths)}",
            hint=f"--document {paths[0]}:{number}",
        )
    return sources, int(number)


def _reads(
    stream: "RunStream", blend: "Blend", sources: list[int], document: int, last_step: int
) -> list[dict[str, Any]]:
    """Return the reads of a document up to a step, in the order of samples."""
    from datakit.reports.provenance import where

    batch = stream.train.global_batch_size
    found: list[dict[str, Any]] = []
    for source in sources:
        passages = where(blend, source, document, last_step * batch)
        if not len(passages):
            continue
        _, numbers = blend.locate(passages.samples)
        epochs = (numbers // blend.rows[source]).tolist()
        found += [
            {"step": sample // batch + 1, "sample": sample, "epoch": epoch, "start": start, "stop": stop}
            for (sample, _, _, start, stop), epoch in zip(passages.rows(), epochs, strict=True)
        ]
    return sorted(found, key=lambda read: read["sample"])
