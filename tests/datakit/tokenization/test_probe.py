"""Probe: every token is in it, also where two overlap, and it stays small for any vocabulary."""

from datakit.tokenization.encoder import texts_of_tokens


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
