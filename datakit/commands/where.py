"""`datakit where`: list the steps of a run that read a document."""

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from datakit.commands.shared import OfRun
from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.errors import UserError, quoted
from threefold.options import option

if TYPE_CHECKING:
    from datakit.config.steps import Steps
    from datakit.order.blend import Blend


@dataclass(frozen=True, kw_only=True)
class Options(OfRun):
    """Options of `datakit where`."""

    document: str = option(..., "a store of the run, and a document of it, counted from 0", metavar="STORE:K")


def run(options: Options) -> None:
    """List the steps and samples at which a run read, or will read, a document, up to the run's last step. It is
    computed from configuration and stores alone.
    """
    blend, steps, last = options.open()
    sources, document = _document(blend, options.document)
    reads = _reads(blend, steps, last, sources, document)
    store = blend.stores[sources[0]]
    num_tokens, origin = len(store.document(document)), store.origin(document)
    if options.json:
        place = {"store": store.place, "document": document, "num_tokens": num_tokens, **asdict(origin)}
        print_json({**place, "last_step": last, "reads": reads})
        return
    print_line(
        f"document {document:,} of {store.place}, {num_tokens:,} tokens: {origin.path or 'no source'}, "
        f"line {origin.line:,}, byte {origin.offset_bytes:,}"
    )
    if not reads:
        print(f"no step up to {last:,}, the last one, reads it")
        return
    rows = [
        (steps.text_of(sample), f"{sample:,}", f"{epoch:,}", f"{start:,} to {stop:,}")
        for _, sample, epoch, start, stop in map(dict.values, reads)
    ]
    print_table(("step", "sample", "epoch", "tokens"), rows)


def _document(blend: "Blend", asked: str) -> tuple[list[int], int]:
    """Return the numbers of the store in the blend, several if it is named repeatedly, and the document's number."""
    place, _, number = asked.rpartition(":")
    paths = [store.place for store in blend.stores]
    sources = [source for source, path in enumerate(paths) if place and is_same_place(path, place)]
    if not number.isdecimal() or not place:
        raise UserError(f"{asked!r} is not a store and a number", hint=f"--document {quoted(f'{paths[0]}:0')}")
    if not sources:
        raise UserError(
            f"the run does not read the store {place}: its stores are {', '.join(paths)}",
            hint=f"--document {quoted(f'{paths[0]}:{number}')}",
        )
    return sources, int(number)


def is_same_place(place: str, named: str) -> bool:
    """Return whether a path or a URL is that of a store's place."""
    return place == named.rstrip("/") or ("://" not in named and os.path.abspath(place) == os.path.abspath(named))


def _reads(blend: "Blend", steps: "Steps", last: int, sources: list[int], document: int) -> list[dict[str, Any]]:
    """Return the reads of a document up to a step, in the order of samples."""
    from datakit.reports.provenance import where

    reads: list[dict[str, Any]] = []
    for source in sources:
        passages = where(blend, source, document, steps.num_samples(last))
        if not len(passages):
            continue
        _, numbers = blend.locate(passages.samples)
        epochs = (numbers // blend.rows[source]).tolist()
        reads += [
            {"step": steps.step_of(sample), "sample": sample, "epoch": epoch, "start": start, "stop": stop}
            for (sample, _, _, start, stop), epoch in zip(passages.rows(), epochs, strict=True)
        ]
    return sorted(reads, key=lambda read: read["sample"])
