"""`datakit train-tokenizer`: train a byte-level BPE tokenizer."""

from dataclasses import dataclass
from typing import Literal

from datakit.commands.shared import OfInput
from threefold.cli import log, print_json
from threefold.options import option

LINES_EVERY_S = 10.0  # of progress, where no terminal is


@dataclass(frozen=True, kw_only=True)
class Options(OfInput):
    """Options of `datakit train-tokenizer`."""

    vocab_size: int = option(..., "tokens in the vocabulary", metavar="N")
    output: str = option(..., "tokenizer.json to write", metavar="FILE")
    special_token: tuple[str, ...] = option(
        (), "a further special token, whose id follows the end-of-document token's; may be repeated",
        repeats=True, metavar="TOKEN",
    )  # fmt: skip
    pretokenizer: Literal["byte-level", "digits", "punctuation", "unicode-scripts", "llama3", "qwen"] = option(
        "byte-level",
        "where text is cut before merges are looked for: as GPT-2 does; that and around each digit or punctuation "
        "mark, or between scripts; as Llama 3 or Qwen do",
    )
    max_bytes: int | None = option(
        None, "train on a sample of so many bytes of text, of documents of all inputs, the same each time",
        minimum=1, metavar="N",
    )  # fmt: skip
    json: bool = option(False, "print one JSON document")


def run(options: Options) -> None:
    """Train a byte-level BPE tokenizer on all documents of the input, or a sample of them; the end-of-document token is
    its token 0.
    """
    from datakit.text.documents import DocumentRules
    from datakit.text.inputs import readable_inputs
    from datakit.tokenization.tokenizer_training import TokenizerTraining
    from threefold.console import live

    training = TokenizerTraining(
        vocab_size=options.vocab_size,
        eod_token=options.eod_token,
        special_tokens=options.special_token,
        pretokenizer=options.pretokenizer,
        max_bytes=options.max_bytes,
        rules=DocumentRules(options.text_key, options.txt_split, options.skip_invalid),
    )
    own = [options.output]
    inputs = readable_inputs(options.inputs, log, but=own) if options.skip_unreadable else options.inputs
    with live(lines_every_s=LINES_EVERY_S) as shown:
        done = training.train(inputs, options.output, shown.say, shown.show)
    tokenizer = done.tokenizer
    if tokenizer.vocab_size < options.vocab_size:
        log(f"the text gave {tokenizer.vocab_size} tokens, not {options.vocab_size}: more text would give more")
    if options.json:
        print_json(
            {
                "path": options.output,
                "vocab_size": tokenizer.vocab_size,
                "fingerprint": tokenizer.fingerprint,
                "num_documents": done.num_documents,
                "text_bytes": done.text_bytes,
                "num_skipped": done.num_skipped,
                "seconds": done.seconds,
            }
        )
        return
    log(
        f"wrote {options.output}: {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint}, of "
        f"{done.num_documents:,} documents, {done.text_bytes / 1e6:,.1f} MB of text in {done.seconds:.1f} s"
    )
