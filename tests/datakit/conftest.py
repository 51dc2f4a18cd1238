"""Shared by datakit's tests: a small tokenizer, a small corpus, the command line run in this process."""

import base64
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import strategies as st

from datakit import TokenStore, verify
from datakit.cli import main
from datakit.tokenization.rank_file import GPT2_PATTERN, sidecar_path
from datakit.tokenization.tokenizer import DEFAULT_EOD
from datakit.tokenization.tokenizer_training import train_tokenizer
from tests.datakit.support.archived import make_archive, make_store
from threefold.errors import UserError
from threefold.storage.service import split_url

Cli = Callable[..., int]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """300 documents: short, empty, long, and in several scripts."""
    words = ["the", "store", "größe", "token", "列車", "naïve", "\n", "emoji 🙂", "return x", "=" * 20, "Ελλάδα"]
    return ["", *(" ".join(words[(i * j) % len(words)] for j in range(1, 1 + i % 97)) for i in range(299))]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_jsonl(folder / "a.jsonl", texts)
    train_tokenizer([str(folder / "a.jsonl")], str(folder / "tok.json"), vocab_size=400)
    return str(folder / "tok.json")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("sp") / "m"
    lines = [f"the quick brown fox {i} jumps over the lazy dog {i * i}" for i in range(500)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=120, minloglevel=2
    )
    return prefix.with_suffix(".model")


@pytest.fixture
def rank_path(tmp_path: Path, tokenizer_path: str) -> Path:
    """The trained tokenizer as a rank file; its end-of-document token has the id 399."""
    return write_ranks(tmp_path / "ranks.tiktoken", ranks_of(tokenizer_path), GPT2_PATTERN, {DEFAULT_EOD: 399})


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `store`, and `archive` of it."""
    folder = tmp_path_factory.mktemp("archived")
    make_store(folder / "store")
    make_archive(folder / "store", str(folder / "archive"))
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a datakit command line; what it printed is then in `capsys`."""

    def call(*words: object) -> int:
        capsys.readouterr()
        try:
            return main([str(word) for word in words])
        except SystemExit as stop:
            return int(stop.code or 0)

    return call


def ranks_of(tokenizer_path: str) -> dict[bytes, int]:
    """The tokens of a trained byte-level BPE in their order, which is that of its merges; its token 0 is left out."""
    printed = [byte for byte in range(256) if chr(byte).isprintable() and byte != 0x20]
    names = {chr(byte): byte for byte in printed}
    names |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in printed)}
    vocab = json.loads(Path(tokenizer_path).read_text())["model"]["vocab"]
    return {bytes(names[letter] for letter in token): number - 1 for token, number in vocab.items() if number}


def write_ranks(path: Path, ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]) -> Path:
    """A rank file with its sidecar."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    sidecar_path(path).write_text(json.dumps({"pattern": pattern, "special_tokens": special_tokens}))
    return path


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def mutate(data: st.DataObject, folder: Path, names: Sequence[str]) -> None:
    """Damage one of these files: cut it short, let it go on, or change bytes of it."""
    path = folder / data.draw(st.sampled_from(list(names)))
    content = bytearray(path.read_bytes())
    how = data.draw(st.sampled_from(["cut", "more", "bytes", "words"]))
    if how == "cut":
        del content[data.draw(st.integers(0, len(content))) :]
    elif how == "more":
        content += data.draw(st.binary(min_size=1, max_size=9))
    else:
        value = (
            st.binary(min_size=1, max_size=1)
            if how == "bytes"
            else st.sampled_from([b"\xff" * 4, b"\xff" * 8, b"\0" * 4])
        )
        for _ in range(data.draw(st.integers(1, 4))):
            new = data.draw(value)
            at = data.draw(st.integers(0, max(len(content) - len(new), 0)))
            content[at : at + len(new)] = new
    path.write_bytes(content)


def named_or_sound(folder: Path, convert: Callable[[], TokenStore]) -> None:
    """Damaged files of a folder give an error that names one of them, or a store of sound files."""
    try:
        store = convert()
    except UserError as error:
        if str(folder) not in error.message:
            raise
    else:
        assert not verify(store.path)


def documents_of(store: TokenStore) -> list[list[int]]:
    """All documents of a store whose files are sound."""
    assert not verify(store.path)
    return [store.document(number).tolist() for number in range(store.num_documents)]


def begin_upload(url: str) -> None:
    """Leave an upload to an s3:// URL unfinished, as a killed process does."""
    from botocore.session import get_session

    bucket, key = split_url(url)
    client = get_session().create_client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    client.create_multipart_upload(Bucket=bucket, Key=key)
