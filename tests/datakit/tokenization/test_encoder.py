"""Encoders: the fast engine is used only where its ids are the same; texts that probe it contain every token."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from datakit.store.token_store import TokenStore
from datakit.tokenization.encoder import Choice, GigatokenEncoder, choose_backend, open_encoder, texts_of_tokens
from datakit.tokenization.tokenizer import open_tokenizer
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import UserError
from threefold.installing import install

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just("a<|endoftext|> b"), max_size=20)


def choose(asked: str, path: str | Path, texts: list[str]) -> Choice:
    return choose_backend(asked, str(path), open_tokenizer(path), texts)


def test_auto_takes_the_fast_engine_and_says_why(tokenizer_path: str, texts: list[str]) -> None:
    assert choose("auto", tokenizer_path, texts).backend == "gigatoken"
    assert f"{sum(map(len, texts)):,} characters of this input" in choose("auto", tokenizer_path, texts).reason
    assert choose("tokenizers", tokenizer_path, texts) == Choice("tokenizers", "as asked for")


def test_a_backend_that_does_not_read_the_file_is_refused(tokenizer_path: str) -> None:
    with pytest.raises(UserError, match="is read by tokenizers, not by sentencepiece"):
        choose("sentencepiece", tokenizer_path, [])


def test_without_the_fast_engine_the_reference_is_taken(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    choice = choose("auto", tokenizer_path, [])
    assert choice.backend == "tokenizers"
    assert choice.reason.startswith(f"gigatoken is not installed; {install('gigatoken', 'fast')} makes this")
    with pytest.raises(UserError, match="gigatoken is not installed") as caught:
        choose("gigatoken", tokenizer_path, [])
    assert caught.value.hint == install("gigatoken", "fast")


HIDDEN = """
import sys
sys.modules["gigatoken"] = None
import datakit
from datakit.cli import main
assert [getattr(datakit, name) for name in datakit.__all__]
sys.exit(main(sys.argv[1:]))
"""


def test_all_verbs_run_without_the_fast_engine_and_one_line_says_so(tmp_path: Path, tokenizer_path: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the store", "größe"])
    (tmp_path / "gigatoken.py").write_text("raise ImportError('hidden')")  # from the workers
    words = [
        "preprocess",
        str(source),
        "--output",
        str(tmp_path / "s"),
        "--tokenizer",
        tokenizer_path,
        "--workers",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDDEN, *words], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "pip install" in line]
    missing = f"gigatoken is not installed; {install('gigatoken', 'fast')} makes this some ten times as fast"
    assert said == [f"tokenizing with tokenizers: {missing}"]
    assert TokenStore.open(tmp_path / "s").num_documents == 2


def test_one_other_id_on_the_input_is_enough_to_refuse(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = GigatokenEncoder.encode_batch

    def astray(self: GigatokenEncoder, texts: list[str]) -> list[np.ndarray]:
        return [ids + (text == "rare") for ids, text in zip(usual(self, texts), texts, strict=True)]

    monkeypatch.setattr(GigatokenEncoder, "encode_batch", astray)
    assert choose("auto", tokenizer_path, ["common"]).backend == "gigatoken"
    assert choose("auto", tokenizer_path, ["common", "rare"]) == Choice(
        "tokenizers", "gigatoken makes other ids than tokenizers for 'rare'"
    )


def test_a_file_that_the_fast_engine_cannot_read_goes_to_the_reference(model_path: Path) -> None:
    choice = choose("auto", model_path, ["the quick brown fox"])
    assert choice.backend == "sentencepiece"
    assert choice.reason.startswith("gigatoken ")
    assert open_encoder(model_path, choice.backend).encode_batch(["the fox"])[0].size


def test_control_symbols_of_any_name_are_probed(tmp_path: Path, texts: list[str]) -> None:
    """sentencepiece reads their names as text; gigatoken takes them for the symbols, but is right without them."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(filter(None, texts)), model_prefix=str(tmp_path / "m"), vocab_size=330, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, bos_id=-1, eos_id=-1,
        minloglevel=2, control_symbols=["[BEGIN]"], unk_piece="[UNKNOWN]",
    )  # fmt: skip
    path, sentence = tmp_path / "m.model", ["the store", "größe 列車"]
    assert open_tokenizer(path).added_tokens() == ["[UNKNOWN]", "[BEGIN]"]
    fast, sure = GigatokenEncoder(path), open_tokenizer(path)
    assert [ids.tolist() for ids in fast.encode_batch(sentence)] == [
        ids.tolist() for ids in sure.encode_batch(sentence)
    ]
    assert fast.encode_batch(["a[BEGIN]b"])[0].tolist() != sure.encode_batch(["a[BEGIN]b"])[0].tolist()
    choice = choose("auto", path, [])
    assert choice.backend == "gigatoken"
    assert "documents with '[BEGIN]' go to sentencepiece" in choice.reason
    mixed = ["the store", "a[BEGIN]b", "x"]
    encoded = open_encoder(path, choice.backend, choice.terms).encode_batch(mixed)
    assert encoded.num_by_reference == 1
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in sure.encode_batch(mixed)]


def test_every_backend_gives_the_same_store(tmp_path: Path, tokenizer_path: str, texts: list[str], cli: Cli) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    stores = []
    for backend in ("auto", "gigatoken", "tokenizers"):
        store = tmp_path / backend
        flags = ["--tokenizer", tokenizer_path, "--append-eod", "--tokenizer-backend", backend]
        assert cli("preprocess", source, "--output", store, *flags) == 0
        stores.append(files_of(store))
    assert stores[0] == stores[1] == stores[2]


def test_tokens_that_overlap_are_put_together() -> None:
    texts = list(texts_of_tokens(["<a>", "a>b", " x"]))
    assert "<a>b" in texts
    assert "<a> x<a>" in texts
    assert "<a>\u0301" in texts


def test_many_and_long_tokens_give_few_texts() -> None:
    many = list(texts_of_tokens([f"<{number}>" for number in range(70_000)]))
    assert any("<69999>" in text for text in many)
    assert len(many) < 200_000
    spaces = list(texts_of_tokens([" " * size for size in range(1, 300)]))
    assert len(spaces) < 20_000
    assert max(map(len, texts_of_tokens(["a" * 10_000, "b" * 10_000]))) < 60_000
