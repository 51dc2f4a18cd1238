"""Text comes out once it is certain: whole characters, and no begin of a text that ends the row."""

import json
from pathlib import Path

import pytest

from datakit import Tokenizer, open_tokenizer, train_tokenizer
from trainer.run.continuation import Continuation, Until

TEXT = "Grüße 🙂, naïve --- ÅÄÖ\n  zwei  Wörter"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of bytes and a few pairs of them: characters are of several tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text(json.dumps({"text": "the cat and the hat " * 50}) + "\n")
    train_tokenizer([str(folder / "text.jsonl")], folder / "tok.json", vocab_size=270)
    return open_tokenizer(folder / "tok.json")


def continued(
    tokenizer: Tokenizer, text: str, until: Until, *, most: int = 10**6, prompt: str = "the "
) -> Continuation:
    """A row that takes the tokens of a text until it ends; what came out is its text."""
    prompt_tokens = tokenizer.encode_batch([prompt])[0].tolist()
    row = Continuation(tokenizer, 0, 0, prompt_tokens, 0, 0, until, most)
    pieces = []
    for token in tokenizer.encode_batch([text])[0].tolist():
        if row.finish is None:
            pieces.append(row.add(token))
            assert row.finish or "\ufffd" not in pieces[-1]
    assert "".join(pieces) == row.text
    return row


def test_pieces_are_the_text(tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode_batch([TEXT])[0])
    row = continued(tokenizer, TEXT, Until(num_tokens))
    assert (row.text, row.finish, len(row.tokens)) == (TEXT, "length", num_tokens)


def test_a_text_ends_a_row_wherever_tokens_are_cut(tokenizer: Tokenizer) -> None:
    for end, expected in (("---", "Grüße 🙂, naïve "), ("🙂", "Grüße "), ("ve -", "Grüße 🙂, naï"), ("Grüße", "")):
        row = continued(tokenizer, TEXT, Until(1000, texts=("nowhere", end)))
        assert (row.text, row.finish) == (expected, "stop")
    row = continued(tokenizer, TEXT, Until(1000, texts=("naïve --- Z", "ÖÖ")))
    assert row.finish is None
    assert TEXT.startswith(row.text)


def test_a_token_ends_a_row_and_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|endoftext|>")
    assert end is not None
    row = continued(tokenizer, "a cat --<|endoftext|> and", Until(1000, frozenset({end}), ("-----",)))
    assert (row.text, row.finish) == ("a cat --", "stop")
    assert end not in row.tokens


def test_what_is_held_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = len(tokenizer.encode_batch(["a --"])[0])
    assert continued(tokenizer, "a ---", Until(tokens, texts=("---",))).text == "a --"
    cut = continued(tokenizer, "🙂", Until(2))
    assert (cut.text.strip("\ufffd"), cut.finish) == ("", "length")


def test_the_window_ends_a_row(tokenizer: Tokenizer) -> None:
    row = continued(tokenizer, TEXT, Until(1000), most=3)
    assert (row.finish, len(row.tokens)) == ("window", 3)
    assert continued(tokenizer, TEXT, Until(3), most=3).finish == "length"


def test_words_have_blanks_between_them(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    content = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (tmp_path / "tok.json").write_text(json.dumps(content))
    row = continued(open_tokenizer(tmp_path / "tok.json"), "b a b", Until(3), prompt="a b")
    assert row.text == " b a b"
