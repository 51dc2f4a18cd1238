"""Probe: texts on which an engine must have the reference's ids before it may replace it.

Hostile text of many scripts, and each added token in all the places where libraries differ about it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from unicodedata import normalize

_MAX_TOKENS_EVERYWHERE = 2_000
_MAX_OVERLAPS, _MAX_OVERLAP_CHARACTERS = 10_000, 64

PROBE = (
    "", " ", "\n", "\t \n\n  x", "  two  spaces   three ", "a\r\nb\r\r\n", "trailing \n ", "\x00\x01\x7f", "x" * 3000,
    "\n\t", "a\n  ", "\n\n   \n\n ", "a \u3000", "\x0b\x0c\x85\u1680", " \u00a0 x", "١٢٣٤५६७८𝟙𝟚𝟛",
    "'ſ 'LL 'Ve ’s ''s", "ǅǆ ʰª", "ǆ\u034f ½\u200d½\u20e3 \u00a0\u093e",
    "The quick brown fox doesn't jump; they'LL say it's 1234567890.50 (e.g. $3,000)!", "def f(x):\n    return x**2",
    "ÀÉÎõü ﬁ ſ ß İ ı e\u0301 \u0301 Å", "Καλημέρα κόσμε", "Съешь же ещё этих мягких булок", "שלום עולם",
    "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया", "வணக்கம்", "สวัสดีชาวโลก", "你好，世界。漢字", "こんにちは世界ﾊﾝｶｸ", "안녕하세요",
    "ጤና ይስጥልኝ", "გამარჯობა", "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f9ff", "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010fffd",
    "\u200b\u200d\ufeff\u2028\u00a0\u3000", "½ ² Ⅷ ①", "https://example.org/a?b=c&d=%20#e",
    "<s> </s> <unk> <|endoftext|> [INST] <0x0A> ▁ Ġ", " ▁▁", "▁▁ a▁ ▁b", "----====____////\\\\\\\\",
)  # fmt: skip


def texts_of_tokens(tokens: Sequence[str]) -> Iterator[str]:
    """Yield each token by itself, beside text, space and marks, in other letters and cut in two; and where two overlap.

    Of more than some thousand tokens, the later ones are only put beside text and space.
    """
    yield from (f"a{token} {token}b" for token in tokens[_MAX_TOKENS_EVERYWHERE:])
    for token in tokens[:_MAX_TOKENS_EVERYWHERE]:
        half, composed, decomposed = len(token) // 2, normalize("NFC", token), normalize("NFD", token)
        yield from (
            token, f"a{token} {token}b", f"  {token}  ", f"{token * 2} 1{token}1", f"\n{token}\n\té{token}é",
            f".{token}.", token.upper(), token.lower(), token[:half],
            f"{token[:half]}{token}{token[half:]}", f"{token}\u0301", f"{token} {token}", f"{token}\n{token}",
            f"{composed} {decomposed} {composed}",
        )  # fmt: skip
    yield from (f"{token} {other}{token}" for token, other in pairwise(tokens))
    yield from islice(_overlaps(tokens), _MAX_OVERLAPS)


def _overlaps(tokens: Sequence[str]) -> Iterator[str]:
    """Two tokens where the end of one is the begin of the other, or where both may take the white space between."""
    beginning = defaultdict[str, list[str]](list)
    for token in tokens:
        for size in range(1, min(len(token), _MAX_OVERLAP_CHARACTERS) + 1):
            beginning[token[:size]].append(token)
    for token in tokens:
        for start in range(max(1, len(token) - _MAX_OVERLAP_CHARACTERS), len(token)):
            for other in beginning.get(token[start:], ()):
                yield token + other[len(token) - start :]
    for spaced in tokens:
        if spaced.strip() != spaced:
            for token in tokens:
                yield f"{token}{spaced}{token}"
