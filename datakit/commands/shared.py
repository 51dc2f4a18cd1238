"""What several verbs of the `datakit` command have in common: options, and how a store that was made is reported."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from datakit.config.run_stream import RunStream
from datakit.config.steps import Steps
from threefold.cli import print_json, print_line
from threefold.console import log
from threefold.flags import Settings, settings
from threefold.options import argument, option

if TYPE_CHECKING:
    from datakit.order.blend import Blend
    from datakit.store.token_store import TokenStore

INPUT_HELP = (
    "files, folders, globs or URLs of such, of .jsonl, .ndjson, .json (one object a line) or .txt, plain, .gz, .zst, "
    ".xz or .bz2, and of .parquet or .arrow; - is jsonl from standard input; pipes are copied to $TMPDIR first"
)
STORED_HELP = "a store or an archive, in a folder, on s3:// or at any fsspec URL"
PLACE_HELP = "a folder, s3://bucket/prefix or any fsspec URL"
DEFAULT_EOD = "<|endoftext|>"
MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Options of a verb that reports."""

    json: bool = option(False, "print one JSON document")

    def show(self, document: object, *lines: str) -> None:
        """Print one JSON document if that is asked for, else the lines of a report."""
        if self.json:
            print_json(document)
        for line in () if self.json else lines:
            print_line(line)


@dataclass(frozen=True, kw_only=True)
class OfInput:
    """Options of a verb that reads text."""

    inputs: tuple[str, ...] = argument("INPUT", INPUT_HELP)
    text_key: str = option(
        "text",
        "key (parquet, arrow: column) of the text, a.b for b inside a; several texts are joined by blank lines",
        metavar="KEY,...",
    )
    txt_split: Literal["file", "line"] = option("file", "what is a document in .txt")
    skip_invalid: bool = option(False, "skip documents that cannot be read or tokenized")
    skip_unreadable: bool = option(False, "go on without inputs that are missing or cannot be read; all are named")
    eod_token: str = option(DEFAULT_EOD, "the end-of-document token", metavar="TOKEN")


@dataclass(frozen=True, kw_only=True)
class OfStored(Reporting):
    """Options of a verb on a store or an archive."""

    store: str = argument("STORE", STORED_HELP)


@dataclass(frozen=True, kw_only=True)
class Linking(Reporting):
    """Options of a verb that puts files of stores into another."""

    copy: bool = option(False, "copy the files, not link them: a link changes with its source")


@dataclass(frozen=True, kw_only=True)
class OfRun(Reporting):
    """Options of a verb on the stream of a run."""

    config: str = argument("CONFIG.toml", "the run's configuration; what is read of it is also a flag, below")
    recorded: str | None = option(
        None,
        "the root.json of a checkpoint of the run: stores that are gone, and steps, are as it has them",
        metavar="FILE",
    )
    flags: Settings = settings(RunStream)

    def open(self) -> tuple["Blend", Steps, int]:
        """Return the blend that the run reads, which samples steps read of it, and the last step."""
        from datakit.order.stream_record import Recorded

        stream = RunStream.read(self.config, self.flags)
        recorded = Recorded.read(self.recorded) if self.recorded else None
        blend, steps = stream.open(recorded), stream.steps(recorded)
        if recorded and recorded.cursor:
            blend = blend.following(recorded.cursor, log)
        return blend, steps, stream.num_steps(blend, steps)


def default_workers() -> int:
    """Return how many files of an archive are in work unless a flag says so."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS)


def counts_text(skipped: dict[str, int]) -> str:
    """Return how many documents were left out, and why."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def print_store(store: "TokenStore", options: Reporting) -> None:
    """Print the summary of a store that was made."""
    num_shards = len(store.manifest.shards)
    counts = {"num_documents": store.num_documents, "num_tokens": store.num_tokens, "num_shards": num_shards}
    options.show(
        {"path": store.place, **counts, "fingerprint": store.fingerprint},
        f"{store.place}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {num_shards} shards",
    )
