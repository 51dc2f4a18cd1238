"""Encoders: the fast engine stands in for the reference only where its ids are the same, and its memory is bounded."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from datakit.tokenization import encoder
from datakit.tokenization.encoder import Choice, GigatokenEncoder, choose_backend, open_encoder
from datakit.tokenization.probe import PROBE
from datakit.tokenization.tokenizer import JsonTokenizer, TextFault, open_tokenizer
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import UserError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just("a<|endoftext|> b"), max_size=20)


@settings(max_examples=200)
@given(texts=TEXTS)
def test_fast_ids_are_the_references(tokenizer_path: str, texts: list[str]) -> None:
    fast = open_encoder(tokenizer_path, "gigatoken").encode_batch([*PROBE, *texts])
    sure = open_tokenizer(tokenizer_path).encode_batch([*PROBE, *texts])
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in sure]


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
    assert (choice.backend, choice.reason) == ("tokenizers", "gigatoken is not installed: pip install gigatoken")
    with pytest.raises(UserError, match="gigatoken is not installed"):
        choose("gigatoken", tokenizer_path, [])


def test_one_other_id_on_the_input_is_enough_to_refuse(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = GigatokenEncoder.encode_batch

    def astray(self: GigatokenEncoder, texts: list[str]) -> list[np.ndarray]:
        return [ids + (text == "rare") for ids, text in zip(usual(self, texts), texts, strict=True)]

    monkeypatch.setattr(GigatokenEncoder, "encode_batch", astray)
    assert choose("auto", tokenizer_path, ["common"]).backend == "gigatoken"
    assert choose("auto", tokenizer_path, ["common", "rare"]) == Choice(
        "tokenizers", "gigatoken gives other ids than tokenizers for 'rare'"
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
    assert choose("auto", path, []).backend == "sentencepiece"
    assert "BEGIN" in choose("auto", path, []).reason or "UNKNOWN" in choose("auto", path, []).reason


def test_a_text_with_a_doubtful_character_goes_to_the_reference(
    tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = GigatokenEncoder(Path(tokenizer_path)), []
    usual = JsonTokenizer.encode_batch

    def watched(self: JsonTokenizer, texts: list[str]) -> list[np.ndarray]:
        seen.extend(texts)
        return usual(self, texts)

    monkeypatch.setattr(JsonTokenizer, "encode_batch", watched)
    texts = ["plain", "größe 列車 🙂", "new \U000323b0", "\u0378"]
    sure = [Library.from_file(tokenizer_path).encode(text).ids for text in texts]
    assert [ids.tolist() for ids in engine.encode_batch(texts)] == sure
    assert seen == texts[2:]


def test_only_the_doubtful_lines_of_a_text_go_to_the_reference_where_lines_stand_apart(
    tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = GigatokenEncoder(Path(tokenizer_path)), []
    usual = JsonTokenizer.encode_batch

    def watched(self: JsonTokenizer, texts: list[str]) -> list[np.ndarray]:
        seen.extend(texts)
        return usual(self, texts)

    monkeypatch.setattr(JsonTokenizer, "encode_batch", watched)
    text = "a line\n\nthe store.\n  new \U000323b0;\nthe store\n \u0378\n\u0378\nsize 列車\nreturn"
    [ids] = engine.encode_batch([text])
    assert ids.tolist() == Library.from_file(tokenizer_path).encode(text).ids
    assert seen == ["\n  new \U000323b0;", "\n \u0378\n\u0378\nsize 列車\nreturn"]

    class Joining:  # gives other ids for lines than for the whole
        def encode(self, text: str) -> np.ndarray:
            return np.array([len(text)], np.uint32)

    monkeypatch.setattr(engine, "_engine", Joining())
    assert np.array_equal(engine.encode_batch([text])[0], ids)
    assert seen[2:] == [text]


class PanicException(BaseException):
    """Named as what the engines written in Rust raise."""


def test_where_the_engine_gives_up_the_reference_steps_in(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def encode(self, text: str) -> np.ndarray:
            raise PanicException(text)

    monkeypatch.setattr(encoder, "_open_engine", lambda _: Engine())
    sure = open_tokenizer(tokenizer_path).encode_batch(["the store", "größe"])
    engine = GigatokenEncoder(Path(tokenizer_path))
    assert [ids.tolist() for ids in engine.encode_batch(["the store", "größe"])] == [ids.tolist() for ids in sure]
    monkeypatch.setattr(Engine, "encode", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        engine.encode_batch(["the store"])


def test_a_fault_of_the_reference_names_its_text_in_the_batch(tmp_path: Path, tokenizer_path: str) -> None:
    library = Library.from_file(tokenizer_path)
    library.add_tokens([AddedToken("<", lstrip=True, rstrip=True), AddedToken("\n", lstrip=True)])
    library.save(str(tmp_path / "t.json"))
    with pytest.raises(TextFault) as caught:
        GigatokenEncoder(tmp_path / "t.json").encode_batch(["fine", "größe", "\u0378<\n "])
    assert caught.value.number == 2


def test_a_cache_that_grew_is_dropped(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([100, 150, 301, 100, 200])
    monkeypatch.setattr(encoder, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(encoder, "MAX_CACHE_BYTES", 200)
    monkeypatch.setattr(encoder, "CHECK_CHARACTERS", 2)
    engine = GigatokenEncoder(Path(tokenizer_path))
    loaded = [engine._engine]
    for _ in range(3):
        assert engine.encode_batch(["the", "store"])[0].size
        loaded.append(engine._engine)
    assert loaded[0] is loaded[1]
    assert loaded[1] is not loaded[2]
    assert loaded[2] is loaded[3]
    assert next(resident, None) is None


def test_words_without_end_take_bounded_memory(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_CACHE_BYTES", 16 << 20)
    monkeypatch.setattr(encoder, "CHECK_CHARACTERS", 1 << 18)
    engine, random = GigatokenEncoder(Path(tokenizer_path)), np.random.default_rng(0)
    before, peak = encoder.resident_bytes(), 0
    for _ in range(80):
        words = random.integers(97, 123, (20000, 9), dtype=np.uint8)
        words[:, 8] = 32
        engine.encode_batch([words.tobytes().decode()])
        peak = max(peak, encoder.resident_bytes())
    assert peak - before < 96 << 20  # 14 MB of distinct words, ten times that in a cache that keeps them all


def test_every_backend_gives_the_same_store(tmp_path: Path, tokenizer_path: str, texts: list[str], cli: Cli) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    stores = []
    for backend in ("auto", "gigatoken", "tokenizers"):
        store = tmp_path / backend
        flags = ["--tokenizer", tokenizer_path, "--append-eod", "--tokenizer-backend", backend]
        assert cli("preprocess", source, "--output", store, *flags) == 0
        stores.append(files_of(store))
    assert stores[0] == stores[1] == stores[2]
