"""`datakit train-tokenizer`: train a byte-level BPE tokenizer."""

from dataclasses import dataclass

from datakit.commands.shared import OfInput
from threefold.cli import log
from threefold.options import option


@dataclass(frozen=True, kw_only=True)
class Options(OfInput):
    """Options of `datakit train-tokenizer`."""

    vocab_size: int = option(..., "tokens in the vocabulary", metavar="N")
    output: str = option(..., "tokenizer.json to write", metavar="FILE")


def run(options: Options) -> None:
    """Train a byte-level BPE tokenizer on all documents of the input; the end-of-document token is its token 0."""
    from datakit.text.inputs import readable_inputs
    from datakit.tokenization.tokenizer_training import train_tokenizer

    own = [options.output]
    tokenizer = train_tokenizer(
        readable_inputs(options.inputs, log, but=own) if options.skip_unreadable else options.inputs,
        options.output,
        vocab_size=options.vocab_size,
        eod_token=options.eod_token,
        text_key=options.text_key,
        txt_split=options.txt_split,
        skip_invalid=options.skip_invalid,
        report=log,
    )
    if tokenizer.vocab_size < options.vocab_size:
        log(f"the text gave {tokenizer.vocab_size} tokens, not {options.vocab_size}: more text would give more")
    log(f"wrote {options.output}: {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint}")
