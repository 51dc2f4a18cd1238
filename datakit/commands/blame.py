"""`datakit blame`: list the documents that a step of a run read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from datakit.commands.shared import OfRun
from threefold.cli import print_json, print_line
from threefold.errors import UserError, quoted
from threefold.options import option

if TYPE_CHECKING:
    from datakit.config.steps import Steps
    from datakit.order.blend import Blend
    from datakit.reports.provenance import Passages

_SHOWN_TOKENS, _SHOWN_CHARACTERS = 48, 100
_REPLACEMENT = "\ufffd"  # what a decoder makes of a character that is cut


@dataclass(frozen=True, kw_only=True)
class Options(OfRun):
    """Options of `datakit blame`."""

    step: int | None = option(
        None, "the step, numbered as in the metrics file: the first is 1", metavar="N", minimum=1, exclusive="what"
    )
    sample: int | None = option(
        None, "one sample of the stream instead, counted from 0", metavar="K", minimum=0, exclusive="what"
    )
    tokenizer: str | None = option(
        None, "the tokenizer that made the stores, if they keep no copy: shows how the text begins", metavar="FILE"
    )
    any_tokenizer: bool = option(False, "take --tokenizer though another made the stores")


def run(options: Options) -> None:
    """List the documents that a step of a run read, or will read: for each sample the documents in it, which of their
    tokens, and the file and line they came from. It is computed from configuration and stores alone.
    """
    from datakit.reports.provenance import blame

    if options.step is None and options.sample is None:
        raise UserError("nothing says which samples", hint=f"datakit blame {quoted(options.config)} --step 1")
    blend, steps, last = options.open()
    samples = _samples(steps, last, options)
    passages = blame(blend, samples)
    texts = _texts(blend, passages, options)
    places = _places(blend, samples)
    for (sample, source, document, start, stop), origin, text in zip(
        passages.rows(), passages.origins(blend), texts, strict=True
    ):
        read = {"document": document, "start": start, "stop": stop, **asdict(origin)}
        read |= {"masked": blend.is_masked(sample, source, document), "text": text}
        places[sample - samples.start]["documents"].append(read)
    if options.json:
        print_json(
            {"step": options.step, "seq_length": blend.sources.seq_length_at(samples.start), "samples": places},
            masks=False,
        )
    else:
        _print(places, options.step)


def _samples(steps: "Steps", last: int, options: Options) -> range:
    """Return the samples that are asked for; UserError if the run ends before them."""
    num_samples = steps.num_samples(last)
    if options.step is not None:
        samples, what, nearest = steps.samples(options.step), f"step {options.step}", f"--step {last}"
    else:
        first = options.sample or 0
        samples, what, nearest = range(first, first + 1), f"sample {first}", f"--sample {num_samples - 1}"
    if samples.stop > num_samples:
        raise UserError(
            f"there is no {what}: the run of {options.config} ends after step {last}, {num_samples} samples",
            hint=f"datakit blame {quoted(options.config)} {nearest}",
        )
    return samples


def _places(blend: "Blend", samples: range) -> list[dict[str, Any]]:
    """Return for each sample its store, row and epoch, and no documents yet."""
    sources, numbers = blend.locate(samples)
    _, tokens = blend.addresses(samples)
    columns, lengths = (sources, numbers // blend.rows[sources], tokens), blend.sources.seq_lengths
    return [
        {
            "sample": sample, "store": blend.stores[source].place, "row": token // lengths[source], "epoch": epoch,
            "documents": [],
        }
        for sample, source, epoch, token in zip(samples, *(column.tolist() for column in columns), strict=True)
    ]  # fmt: skip


def _texts(blend: "Blend", passages: "Passages", options: Options) -> Sequence[str | None]:
    """Return how the text of each passage begins, None without a tokenizer; UserError if it did not make the stores."""
    from datakit.reports.excerpt import open_matching_tokenizer

    stores = [blend.stores[source] for source in dict.fromkeys(passages.sources.tolist())]
    keeper = next((store for store in stores if store.manifest.tokenizer_files), stores[0])
    tokenizer = open_matching_tokenizer(keeper, options.tokenizer, is_any=options.any_tokenizer)
    if tokenizer is None:
        return [None] * len(passages)
    begins = (
        blend.stores[source].document(document)[start : min(stop, start + _SHOWN_TOKENS)]
        for _, source, document, start, stop in passages.rows()
    )
    return [tokenizer.decode(tokens).rstrip(_REPLACEMENT)[:_SHOWN_CHARACTERS] for tokens in begins]


def _print(samples: list[dict[str, Any]], step: int | None) -> None:
    if step is not None:
        print(f"step {step:,}: samples {samples[0]['sample']:,} to {samples[-1]['sample']:,}")
    for sample in samples:
        print_line(f"sample {sample['sample']:,}: row {sample['row']:,} of {sample['store']}, epoch {sample['epoch']}")
        for read in sample["documents"]:
            print_line(
                f"  document {read['document']:,}, tokens {read['start']:,} to {read['stop']:,}: "
                f"{read['path'] or 'no source'}, line {read['line']:,}, byte {read['offset_bytes']:,}"
                f"{', loss masked' if read['masked'] else ''}"
            )
            if read["text"] is not None:
                print_line(f"    {read['text']!r}")
