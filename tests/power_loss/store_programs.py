"""Programs that write token stores: every verb of datakit, once with one shard and once with seven."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np

from datakit import TokenStore, train_tokenizer, verify, write_store
from datakit.cli import main as datakit_main
from tests.power_loss.program import Program, say
from tests.support.checks import require
from threefold.errors import UserError

DOCUMENTS = [np.arange(start, start + 40) for start in range(0, 200, 40)]


def stored(folder: Path) -> None:
    """Write a token store of documents."""
    write_store(folder / "store", DOCUMENTS, vocab_size=1000)
    say("reads store")


def texts(folder: Path, num_lines: int = 12) -> None:
    """Make a text and a tokenizer for it."""
    lines = [json.dumps({"text": f"the quick brown fox {number} jumps"}) for number in range(num_lines)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    train_tokenizer([str(folder / "a.jsonl")], str(folder / "tok.json"), vocab_size=300)


def datakit(*words: object) -> Callable[[Path], None]:
    """Return what runs a verb in a folder, and promises that the store that is its last word reads."""

    def work(folder: Path) -> None:
        paths = [str(folder / word) if isinstance(word, Path) else str(word) for word in words]
        said = StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = datakit_main(paths)
        require(code == 0, said.getvalue())
        say(f"reads {words[-1]}")

    return work


def preprocessed(folder: Path) -> None:
    """Have a text, and a store of it."""
    texts(folder)
    PREPROCESS(folder)


def archived(folder: Path) -> None:
    """Have a store, and an archive of it."""
    preprocessed(folder)
    ARCHIVE(folder)


def preprocessed_in_shards(folder: Path) -> None:
    """Have a text, and a store of it in several shards."""
    many_texts(folder)
    PREPROCESS_SHARDS(folder)


def archived_in_shards(folder: Path) -> None:
    """Have a store of several shards, and an archive of it."""
    preprocessed_in_shards(folder)
    ARCHIVE(folder)


many_texts = partial(texts, num_lines=48)
TEXT = (Path("a.jsonl"), "--tokenizer", Path("tok.json"))
PREPROCESS = datakit("preprocess", *TEXT, "--output", Path("store"))
PREPROCESS_SHARDS = datakit("preprocess", *TEXT, "--item-size", 300, "--output", Path("store"))
MERGE = datakit("merge", Path("store"), Path("store"), "--output", Path("merged"))
ARCHIVE = datakit("archive", Path("store"), "--output", Path("archive"))
UNARCHIVE = datakit("unarchive", Path("archive"), "--output", Path("unpacked"))


def opened(path: Path) -> TokenStore:
    """Open a store, or an archive with a cache of its own."""
    if path.name != "archive":
        return TokenStore.open(path)
    cache = path.parent.with_name("cache")
    shutil.rmtree(cache, ignore_errors=True)
    return TokenStore.open(path.as_uri(), cache=cache)


def store_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with stores: other tokens, or one that was promised and of which a file is not sound."""
    whole: list[int] = []
    for name in ("store", "archive", "unpacked", "merged"):
        place = folder / name
        try:
            store = opened(place)
            tokens = store.tokens(0, store.num_tokens).tolist()
            if f"reads {name}" in promises and (damage := verify(place)):
                return f"{name} was promised and is damaged: {damage[0]}"
        except UserError as error:
            if f"reads {name}" in promises:
                return f"{name} was promised: {type(error).__name__}"
            continue
        whole = whole or tokens
        if not tokens or tokens != (2 * whole if name == "merged" else whole):
            return f"{name} has other tokens"
    return ""


STORED, ARCHIVED = ("reads store",), ("reads store", "reads archive")
STORE_PROGRAMS = {
    "store": Program(stored, store_fault, is_repeatable=False),
    "preprocess": Program(PREPROCESS, store_fault, texts),
    "merge": Program(MERGE, store_fault, preprocessed, STORED),
    "archive": Program(ARCHIVE, store_fault, preprocessed, STORED),
    "unarchive": Program(UNARCHIVE, store_fault, archived, ARCHIVED),
    "preprocess shards": Program(PREPROCESS_SHARDS, store_fault, many_texts),
    "merge shards": Program(MERGE, store_fault, preprocessed_in_shards, STORED),
    "archive shards": Program(ARCHIVE, store_fault, preprocessed_in_shards, STORED),
    "unarchive shards": Program(UNARCHIVE, store_fault, archived_in_shards, ARCHIVED),
}
