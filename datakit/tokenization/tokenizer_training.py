"""Training a byte-level BPE tokenizer, so that text is all one needs to begin.

Byte-pair encoding: Sennrich et al. 2016; over bytes: Radford et al. 2019.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from datakit.files.durable import replace_durably, url_behind, writing
from datakit.text.documents import DocumentRules
from datakit.text.hf_datasets import Input, paths_of
from datakit.text.inputs import find_inputs
from datakit.text.spool import Spool
from datakit.tokenization.rank_file import LLAMA3_PATTERN, QWEN_PATTERN
from datakit.tokenization.tokenizer import DEFAULT_EOD, Tokenizer, open_tokenizer
from datakit.tokenization.training_texts import TrainingTexts
from threefold.errors import UserError, quoted
from threefold.storage.folders import make_folders

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
        seconds = time.monotonic() - started_s
        return TrainedTokenizer(open_tokenizer(path), texts.num_documents, texts.text_bytes, texts.num_skipped, seconds)

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
    before = {
        "digits": library.Digits(individual_digits=True),
        "punctuation": library.Punctuation(behavior="isolated"),
        "unicode-scripts": library.UnicodeScripts(),
    }
    if name in before:
        return library.Sequence([before[name], words])
    patterns = {"llama3": LLAMA3_PATTERN, "qwen": QWEN_PATTERN}
    if name in patterns:
        as_bytes = library.ByteLevel(add_prefix_space=False, use_regex=False)
        return library.Sequence([library.Split(Regex(patterns[name]), "isolated"), as_bytes])
    return words


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
