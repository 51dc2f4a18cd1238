"""Training a byte-level BPE tokenizer, so that text is all one needs to begin.

Byte-pair encoding: Sennrich et al. 2016; over bytes: Radford et al. 2019.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from datakit.files.durable import replace_durably, url_behind, writing
from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.hf_datasets import Input, paths_of
from datakit.text.inputs import FileSlice, InputFile, find_inputs
from datakit.text.spool import Spool
from datakit.tokenization.tokenizer import DEFAULT_EOD, Tokenizer, open_tokenizer
from threefold.errors import UserError, quoted
from threefold.storage.folders import make_folders

NUM_BYTES = 256


def train_tokenizer(
    inputs: Sequence[Input],
    output: str,
    *,
    vocab_size: int,
    eod_token: str = DEFAULT_EOD,
    text_key: str = "text",
    txt_split: str = "file",
    skip_invalid: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """Train on all documents of the inputs and write a `tokenizer.json`; token 0 is `eod_token`.

    Inputs are as for `preprocess`. Every text can be encoded, whatever its bytes. The vocabulary is smaller than
    `vocab_size` where the text does not give so many merges. `skip_invalid` goes on past documents that cannot be read,
    and reports how many.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size <= NUM_BYTES:
        raise UserError(
            f"a vocabulary of {vocab_size}: the {NUM_BYTES} bytes and {eod_token!r} come first",
            hint="--vocab-size 32768",
        )
    path = Path(output)
    if url := url_behind(path):
        raise UserError(
            f"{url} is not a local file, and a tokenizer is written to one", hint=f"--output {quoted(path.name)}"
        )
    if path.suffix != ".json":
        raise UserError(
            f"{output}: a tokenizer file ends in .json", hint=f"--output {quoted(path.with_suffix('.json'))}"
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    spool = Spool(report)  # its copies of pipes are there as long as it is
    paths = paths_of(inputs, text_key)
    files = find_inputs(paths, spool, report, but=[output])
    texts = _Texts(files, DocumentRules(text_key, txt_split, skip_invalid))
    library.train_from_iterator(texts, trainer)
    if texts.num_skipped:
        report(f"skipped {texts.num_skipped:,} invalid documents")
    if texts.num_replaced:
        report(f"replaced lone surrogates by U+FFFD in {texts.num_replaced:,} documents")
    if not texts.num_documents:
        raise UserError(f"the input is empty: no document in {' '.join(paths)}", hint=files[0].hint("head -c 300"))
    with writing(path):
        make_folders(path.parent)
        replace_durably(path, library.to_str(pretty=True).encode())
    return open_tokenizer(path)


class _Texts:
    """The texts of all files; counts the documents that it yields, skips, and yields with lone surrogates replaced."""

    def __init__(self, files: Sequence[InputFile], rules: DocumentRules) -> None:
        self._files, self._rules = files, rules
        self.num_documents = self.num_skipped = self.num_replaced = 0

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            whole = FileSlice(file, 0, file.size_bytes)
            reader = DocumentReader(whole, self._rules)
            for document in reader:
                self.num_documents += 1
                yield document.text
            self.num_skipped += reader.skipped.total()
            self.num_replaced += reader.num_replaced
