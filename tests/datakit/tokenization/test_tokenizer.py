"""Tokenizers: ids equal the libraries' own, end-of-document tokens are looked up, faulty files are refused."""

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from datakit.tokenization.encoder import choose_backend, open_encoder
from datakit.tokenization.tokenizer import DEFAULT_EOD, TextFault, identify, open_tokenizer
from threefold.errors import UserError


def test_json_ids_are_the_librarys(tokenizer_path: str, texts: list[str]) -> None:
    tokenizer, library = open_tokenizer(tokenizer_path), Library.from_file(tokenizer_path)
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [library.encode(text).ids for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_truncation_and_padding_are_off_and_special_tokens_of_the_file_stay(
    tokenizer_path: str, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    library = Library.from_file(tokenizer_path)
    library.post_processor = TemplateProcessing(single=f"{DEFAULT_EOD} $A", special_tokens=[(DEFAULT_EOD, 0)])
    library.enable_truncation(4)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "t.json"))
    [ids] = open_tokenizer(tmp_path / "t.json").encode_batch(["a longer text that has more than four tokens"])
    assert len(ids) not in (4, 50)
    assert ids[0] == 0


def test_sentencepiece_ids_are_the_librarys(model_path: Path) -> None:
    tokenizer = open_tokenizer(model_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    texts = ["the quick fox", "", "unseen ✓ characters", "two\nlines"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [library.encode(text) for text in texts]
    assert tokenizer.decode(tokenizer.encode_batch(texts)[0]) == texts[0]
    assert (tokenizer.kind, tokenizer.vocab_size) == ("sentencepiece", 120)
    assert tokenizer.token_id("</s>") == 2
    assert tokenizer.token_id(DEFAULT_EOD) is None


def test_identity(tokenizer_path: str, model_path: Path) -> None:
    tokenizer = open_tokenizer(tokenizer_path)
    found = identify(tokenizer, tokenizer_path, DEFAULT_EOD, required=True)
    assert (found.kind, found.eod_token, found.eod_id) == ("tokenizers", DEFAULT_EOD, 0)
    missing = identify(open_tokenizer(model_path), str(model_path), DEFAULT_EOD, required=False)
    assert (missing.eod_token, missing.eod_id) == (None, None)
    with pytest.raises(UserError, match="has no token '<|endoftext|>'".replace("|", r"\|")) as caught:
        identify(open_tokenizer(model_path), str(model_path), DEFAULT_EOD, required=True)
    assert "--eod-token" in str(caught.value.hint)
    with pytest.raises(UserError, match="of its own it has") as caught:
        identify(tokenizer, tokenizer_path, "</s>", required=True)
    assert caught.value.hint == f"--eod-token '{DEFAULT_EOD}'"


def test_the_fingerprint_is_of_the_file(tokenizer_path: str, tmp_path: Path) -> None:
    copy = tmp_path / "other.json"
    copy.write_bytes(Path(tokenizer_path).read_bytes())
    assert open_tokenizer(copy).fingerprint == open_tokenizer(tokenizer_path).fingerprint
    changed = json.loads(copy.read_text())
    changed["model"]["merges"].pop()
    copy.write_text(json.dumps(changed))
    assert open_tokenizer(copy).fingerprint != open_tokenizer(tokenizer_path).fingerprint


def test_a_text_at_which_tokenizers_gives_up_is_named(tokenizer_path: str, tmp_path: Path) -> None:
    library = Library.from_file(tokenizer_path)
    library.add_tokens([AddedToken("<", lstrip=True, rstrip=True), AddedToken("\n", lstrip=True)])
    library.save(str(tmp_path / "t.json"))
    tokenizer = open_tokenizer(tmp_path / "t.json")
    with pytest.raises(
        TextFault, match=r"gives up on a text of 3 characters that begins '<\\n ': AddedVocabulary"
    ) as caught:
        tokenizer.encode_batch(["fine", "<\n ", "good"])
    assert caught.value.number == 1
    assert tokenizer.encode_batch(["fine"])[0].tolist() == library.encode("fine").ids
    choice = choose_backend("auto", str(tmp_path / "t.json"), tokenizer, ["<\n "])
    chosen = open_encoder(tmp_path / "t.json", choice.backend, choice.terms)
    with pytest.raises(TextFault, match="gives up on a text of 3 characters"):  # as the reference does
        chosen.encode_batch(["fine", "<\n ", "good"])
    assert chosen.encode_batch(["fine"]).num_by_reference == 0


PANICS = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "continuing_subword_prefix": "##"}}


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("t.json", json.dumps(PANICS).encode(), "cannot be read as a tokenizers tokenizer"),  # a panic of Rust
        ("t.json", b"{}", "cannot be read as a tokenizers tokenizer"),
        ("t.json", b"\xff", "cannot be read as a tokenizers tokenizer"),
        ("t.model", b"nothing", "cannot be read as a sentencepiece tokenizer"),
        ("t.txt", b"", "neither a tokenizer.json nor"),
        ("t.tiktoken", b"{}", "is a rank file of unknown origin"),
        ("none.json", None, "no such tokenizer"),
    ],
)
def test_faulty_files(tmp_path: Path, name: str, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=fault):
        open_tokenizer(tmp_path / name)
