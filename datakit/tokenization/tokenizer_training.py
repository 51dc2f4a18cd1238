"""Training a byte-level BPE tokenizer, so that text is all one needs to begin.

Byte-pair encoding: Sennrich et al. 2016; over bytes: Radford et al. 2019. It reads all texts of the input, or a sample
of them that is the same each time.

A sample is of documents over all inputs: those with the smallest hashes of their places, so many as fit into its bytes.
Of inputs much larger than it some hundred places are read, each some MiB; files that are compressed or of columns can
only be read whole. Memory is the sample's.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from datakit.files.durable import replace_durably, url_behind, writing
from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.formats import is_lines
from datakit.text.hf_datasets import Input, paths_of
from datakit.text.inputs import FileSlice, InputFile, cut, default_item_bytes, find_inputs
from datakit.text.spool import Spool
from datakit.tokenization.rank_file import LLAMA3_PATTERN, QWEN_PATTERN
from datakit.tokenization.tokenizer import DEFAULT_EOD, Tokenizer, open_tokenizer
from threefold.errors import UserError, quoted
from threefold.storage.folders import make_folders

READ_PER_BYTE = 8  # of the input for each byte of the sample
_NUM_PLACES, _MIN_FILES, _MIN_BYTES = 256, 8, 1 << 20


class TrainingTexts:
    """An iterable of texts; it counts the documents that it yields, skips, and yields with lone surrogates replaced.

    `share` is how much of the input was read, for a thread that shows it.
    """

    def __init__(self, files: Sequence[InputFile], rules: DocumentRules, max_bytes: int | None = None) -> None:
        self._files, self._rules, self._max_bytes = files, rules, max_bytes
        self.num_documents = self.num_skipped = self.num_replaced = self.text_bytes = 0
        self.share = 0.0

    def __iter__(self) -> Iterator[str]:
        parts = [(FileSlice(file, 0, file.size_bytes), file.size_bytes) for file in self._files]
        everything = (text for _, text in self._read(parts))
        for text in everything if self._max_bytes is None else sample(self._read(self._places()), self._max_bytes):
            self.num_documents += 1
            self.text_bytes += len(text.encode())
            yield text
        self.share = 1.0

    def _places(self) -> list[tuple[FileSlice, int]]:
        """Return the slices that a sample is read from, each with how many bytes of it are read, in order."""
        read_bytes = READ_PER_BYTE * (self._max_bytes or 0)
        most = max(_MIN_BYTES, read_bytes // _NUM_PLACES)
        items = cut(self._files, default_item_bytes(self._files), split_txt=self._rules.txt_split == "line")
        slices = [part for item in items for part in item.slices]
        chosen: list[tuple[int, int]] = []
        total = 0
        for number in sorted(range(len(slices)), key=lambda number: _hash(f"slice {number}")):
            size = slices[number].stop - slices[number].start
            if is_lines(slices[number].file.kind) and not slices[number].file.compression:
                size = min(size, most)
            chosen.append((number, size))
            total += size
            if total >= read_bytes and len(chosen) >= _MIN_FILES:
                break
        return [(slices[number], size) for number, size in sorted(chosen)]

    def _read(self, parts: Sequence[tuple[FileSlice, int]]) -> Iterator[tuple[str, str]]:
        """Yield a name of the place and the text of each document, of each slice up to so many bytes."""
        total, done = max(1, sum(size for _, size in parts)), 0
        for number, (part, size) in enumerate(parts):
            reader, read = DocumentReader(part, self._rules), 0
            for count, document in enumerate(reader):
                yield f"{number} {count}", document.text
                read += document.input_bytes
                self.share = (done + min(read, size)) / total
                if read >= size < part.stop - part.start:
                    break
            done += size
            self.num_skipped += reader.skipped.total()
            self.num_replaced += reader.num_replaced


def sample(texts: Iterator[tuple[str, str]], max_bytes: int) -> list[str]:
    """Return the texts whose names have the smallest hashes, in their order, as many as fit into `max_bytes`.

    A text that is larger by itself is left out; if all are, it is the begin of one.
    """
    heap: list[tuple[int, int, str]] = []  # the largest hash first
    total, largest = 0, ""
    for number, (name, text) in enumerate(texts):
        size = len(text.encode())
        if size > max_bytes:
            largest = largest or text[:max_bytes]
            continue
        heapq.heappush(heap, (-_hash(name), number, text))
        total += size
        while total > max_bytes:
            total -= len(heapq.heappop(heap)[2].encode())
    chosen = [text for _, _, text in sorted(heap, key=lambda entry: entry[1])]
    return chosen or [largest.encode()[:max_bytes].decode(errors="ignore")] * bool(largest)


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


NUM_BYTES = 256
SHOWN_EVERY_S = 0.5
Pretokenizer = Literal["byte-level", "digits", "punctuation", "unicode-scripts", "llama3", "qwen"]
Report = Callable[[str], None]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """A tokenizer that was trained, and what it was trained on."""

    tokenizer: Tokenizer
    num_documents: int
    text_bytes: int
    num_skipped: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerTraining:
    """How a tokenizer is trained.

    Token 0 is `eod_token`, then come `special_tokens`, then the 256 bytes. `pretokenizer` says where text is cut before
    merges are looked for: as GPT-2 does ("byte-level"), that and around each digit, each punctuation mark or between
    scripts, or as Llama 3 or Qwen do; none of them loses a byte. With `max_bytes` it is trained on a sample of so many
    bytes of text, of documents of all inputs, the same each time.
    """

    vocab_size: int
    eod_token: str = DEFAULT_EOD
    special_tokens: Sequence[str] = ()
    pretokenizer: Pretokenizer = "byte-level"
    max_bytes: int | None = None
    rules: DocumentRules = field(default_factory=DocumentRules)

    def __post_init__(self) -> None:
        tokens = [self.eod_token, *self.special_tokens]
        if "" in tokens:
            raise UserError("a special token without a character", hint="--special-token '<|user|>'")
        if twice := next((token for token in tokens if tokens.count(token) > 1), None):
            raise UserError(f"the special token {twice!r} is named twice", hint="--special-token once for each")
        if self.vocab_size < NUM_BYTES + len(tokens):
            first = f"the {NUM_BYTES} bytes and {', '.join(map(repr, tokens))} come first"
            raise UserError(f"a vocabulary of {self.vocab_size}: {first}", hint="--vocab-size 32768")
        if self.pretokenizer not in get_args(Pretokenizer):
            raise UserError(f"there is no pretokenizer {self.pretokenizer!r}", hint="--pretokenizer byte-level")

    def train(
        self,
        inputs: Sequence[Input],
        output: str,
        report: Report,
        progress: Progress = lambda text, share: None,
        *,
        every_s: float = SHOWN_EVERY_S,
    ) -> TrainedTokenizer:
        """Train on the inputs, which are as for `preprocess`, and write a `tokenizer.json`.

        `progress` takes from a thread of its own, every so many seconds, what is done and which share of it.
        """
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        path, started_s = output_path(output), time.monotonic()
        library = Library(models.BPE())
        library.pre_tokenizer = made_pretokenizer(self.pretokenizer)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[self.eod_token, *self.special_tokens],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        spool = Spool(report)  # its copies of pipes are there as long as it is
        paths = paths_of(inputs, self.rules.text_key)
        files = find_inputs(paths, spool, report, but=[output])
        texts = TrainingTexts(files, self.rules, self.max_bytes)
        with showing(lambda: progress(self._doing(texts), texts.share), every_s):
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
        counts = texts.num_documents, texts.text_bytes, texts.num_skipped
        return TrainedTokenizer(open_tokenizer(path), *counts, time.monotonic() - started_s)

    def _doing(self, texts: TrainingTexts) -> str:
        """Return what the training does now."""
        if texts.share < 1.0:
            return f"reading, {texts.text_bytes / 1e6:,.0f} MB of text"
        return f"merging {texts.text_bytes / 1e6:,.0f} MB of text into {self.vocab_size:,} tokens"


def train_tokenizer(
    inputs: Sequence[Input],
    output: str,
    *,
    vocab_size: int,
    eod_token: str = DEFAULT_EOD,
    text_key: str = "text",
    txt_split: str = "file",
    skip_invalid: bool = False,
    report: Report = lambda _: None,
) -> Tokenizer:
    """Train on all documents of the inputs and write a `tokenizer.json`; token 0 is `eod_token`.

    Inputs are as for `preprocess`. Every text can be encoded, whatever its bytes. The vocabulary is smaller than
    `vocab_size` where the text does not give so many merges. `skip_invalid` goes on past documents that cannot be read,
    and reports how many. `TokenizerTraining` has more choices.
    """
    rules = DocumentRules(text_key, txt_split, skip_invalid)
    training = TokenizerTraining(vocab_size=vocab_size, eod_token=eod_token, rules=rules)
    return training.train(inputs, output, report).tokenizer


def output_path(output: str) -> Path:
    """Return the path of a tokenizer that is to be written; UserError if it is not a local .json file."""
    path = Path(output)
    if url := url_behind(path):
        raise UserError(
            f"{url} is not a local file, and a tokenizer is written to one", hint=f"--output {quoted(path.name)}"
        )
    if path.suffix != ".json":
        raise UserError(
            f"{output}: a tokenizer file ends in .json", hint=f"--output {quoted(path.with_suffix('.json'))}"
        )
    return path


def made_pretokenizer(name: Pretokenizer) -> Any:
    """Return what cuts text into words, of which none of its bytes is lost."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as library

    words = library.ByteLevel(add_prefix_space=False)
    as_bytes = library.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = {
        "digits": [library.Digits(individual_digits=True), words],
        "punctuation": [library.Punctuation(behavior="isolated"), words],
        "unicode-scripts": [library.UnicodeScripts(), words],
        "llama3": [library.Split(Regex(LLAMA3_PATTERN), "isolated"), as_bytes],
        "qwen": [library.Split(Regex(QWEN_PATTERN), "isolated"), as_bytes],
    }
    return library.Sequence(steps[name]) if name in steps else words


@contextmanager
def showing(show: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call a function time and again beside the block, on a thread that ends with it."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(every_s):
            show()

    thread = threading.Thread(target=tick, name="datakit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
