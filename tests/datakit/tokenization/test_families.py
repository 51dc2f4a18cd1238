"""Tokenizers built as Llama 2, Mistral, Gemma and Llama 3 have them: the fast engine runs, with the reference's ids."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.datakit.families import FAMILIES, train_pieces
from datakit.store.token_store import TokenStore
from datakit.tokenization.encoder import Encoder, choose_backend, open_encoder
from datakit.tokenization.tokenizer import Tokenizer, open_tokenizer
from tests.datakit.conftest import Cli, write_jsonl
from tests.datakit.tokenization.test_hostile_text import SCRIPTS

Opened = tuple[Encoder, Tokenizer]
LINES = [*SCRIPTS.values(), *["def f(x):", "    return x ** 2", "", "", "# the store; don't\t\t1234.5", "</s><s>"]]
LINES = [line.replace("\x00", "") for line in LINES]
VOCAB_SIZE = 1500
PIECES = st.sampled_from(
    [*LINES, "<s>", "</s>", "<bos>", "<unk>", "[INST]", "<unused7>", "<|begin_of_text|>", "<s", "</", "<0x0A>", "\x00",
     " ", "  ", " " * 40, "\n", "\n\n", "\n" * 33, "\t", "▁", "▁▁", " ▁", "\ufffd", "\u0378", "the", "x" * 300]
)  # fmt: skip
HOSTILE = st.lists(PIECES | st.characters(exclude_categories=["Cs"]), max_size=20).map("".join)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a family, by its name."""
    folder = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        path = folder / name
        if path.exists():
            return path
        if path.suffix == ".json":
            FAMILIES[path.stem](LINES, VOCAB_SIZE).save(str(path))
        else:
            path.write_bytes(train_pieces(LINES, VOCAB_SIZE).serialized_model_proto())
        return path

    return make


@pytest.fixture(scope="module", params=["llama2.json", "mistral.json", "gemma.json", "llama3.json", "llama2.model"])
def opened(request: pytest.FixtureRequest, make_folder: Callable[[str], Path]) -> Opened:
    path = make_folder(request.param)
    reference = open_tokenizer(path)
    choice = choose_backend("auto", str(path), reference, ["the store"])
    assert choice.backend == "gigatoken", choice.reason
    return open_encoder(path, choice.backend, choice.terms), reference


@given(texts=st.lists(HOSTILE, max_size=6))
def test_all_documents_have_the_references_ids(opened: Opened, texts: list[str]) -> None:
    fast, reference = opened
    found = fast.encode_batch(texts)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in reference.encode_batch(texts)]


def test_only_what_may_differ_goes_to_the_reference(opened: Opened) -> None:
    fast, reference = opened
    texts = ["plain", "größe\n\n  列車", "", "a <s> b", "new \u0378"]
    is_model = reference.kind == "sentencepiece"
    assert fast.encode_batch(texts[:3]).num_by_reference == 0
    assert fast.encode_batch(texts).num_by_reference == 1 + is_model


def test_what_a_post_processor_adds_stands_around_each_document(
    make_folder: Callable[[str], Path], tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    path, texts = make_folder("llama2.json"), ["the store", "", "new \u0378", "x </s> y"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    flags = ["--tokenizer", path, "--append-eod", "--eod-token", "</s>"]
    assert cli("preprocess", source, "--output", tmp_path / "s", *flags) == 0
    said = capsys.readouterr().err
    assert "tokenizing with gigatoken: the ids of tokenizers" in said
    assert "1 documents went to tokenizers, one by one" in said
    store, sure = TokenStore.open(tmp_path / "s"), open_tokenizer(path).encode_batch(texts)
    assert [store.document(number).tolist() for number in range(4)] == [[*ids.tolist(), 2] for ids in sure]
    assert all(ids[0] == 1 for ids in sure)
    assert not np.array_equal(sure[0], sure[1])
