"""`datakit blend`: count what a run reads of each of its stores."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from datakit.commands.shared import OfRun
from threefold.cli import print_json, print_line
from threefold.console import print_table
from threefold.options import option

if TYPE_CHECKING:
    from datakit.order.mixture import Segment


@dataclass(frozen=True, kw_only=True)
class Options(OfRun):
    """Options of `datakit blend`."""

    plot: str | None = option(
        None, "draw tokens and epochs of each store over the steps; needs threefold[plot]", metavar="FILE.png"
    )


def run(options: Options) -> None:
    """Count the tokens, samples and epochs that a run reads of each of its stores up to its last step, and the samples
    that repeat what was read before. It is computed from configuration and stores alone.
    """
    from datakit.reports.shares import shares, source_name, unread_lines, write_plot
    from threefold.plot import require_plot

    if options.plot:
        require_plot(options.plot)
    blend, steps, last = options.open()
    num_samples = steps.num_samples(last)
    stores = shares(blend, num_samples)
    num_tokens = sum(share.tokens_read for share in stores)
    if options.plot:
        write_plot(blend, steps, last, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    if options.json:
        totals = {"last_step": last, "num_samples": num_samples, "tokens_read": num_tokens}
        segments = [  # with the number of masked documents: there may be many
            {**asdict(segment), "masked": None if segment.masked is None else len(segment.masked)}
            for segment in blend.segments
        ]
        print_json({**totals, "stores": list(map(asdict, stores)), "segments": segments})
        return
    lengths = ", then ".join(f"{length:,}" for length in blend.sources.lengths)
    begin = f", from step {steps.first_known + 1:,} on" if steps.first_known else ""
    print(f"{last:,} steps{begin} of {steps.sizes} samples of {lengths} tokens: {num_tokens:,} tokens")
    rows = [
        (
            f"{share.weight:.4f}", f"{share.tokens_read:,}", f"{share.num_samples:,}", f"{share.epochs:.3f}",
            f"{share.repeated_samples:,}", f"{share.num_tokens:,}", source_name(blend, source),
        )
        for source, share in enumerate(stores)
    ]  # fmt: skip
    for segment in blend.segments[1:]:
        step = steps.text_of(segment.from_sample)
        print(f"from sample {segment.from_sample:,}, in step {step}: {', '.join(_texts(segment))}")
    print_table(("weight", "tokens", "samples", "epochs", "repeated", "it holds", "store"), rows, left={"store"})
    for line in (*unread_lines(blend), *blend.notes):
        print_line(line)


def _texts(segment: "Segment") -> list[str]:
    """Return what a segment changes."""
    rows = f"rows of {segment.seq_length:,} tokens, each store from its beginning" if segment.seq_length else ""
    weights = "other weights" if segment.weights else ""
    skipped = [f"samples {first:,} to {stop:,} are skipped" for first, stop in segment.skip]
    masked = "" if segment.masked is None else f"{len(segment.masked):,} documents masked"
    return list(filter(None, (rows or weights, *skipped, masked)))
