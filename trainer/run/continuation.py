"""Continuation: one row of tokens that grows, its text as it becomes certain, and where it ends.

Text is certain once its last character is whole and no text that ends the row may have begun. Each token costs the
decoding of a few tokens before it, however long the row is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from datakit import Tokenizer

Finish = Literal["stop", "length", "window"]
CONTEXT = 8  # tokens of the prompt that the first ones are decoded behind
PARTIAL = "\ufffd"  # what a tokenizer makes of a character whose bytes are not all there


@dataclass(frozen=True, slots=True)
class Until:
    """Where continuations end: after `num_tokens`, before one of some tokens, or before one of some texts.

    None of these is part of the text.
    """

    num_tokens: int = 64
    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()


@dataclass(slots=True)
class Continuation:
    """A row under way: prompt and sample are numbers, random numbers are those of a `draw` with a `key`.

    `most_tokens` are those that the model's window leaves it. `tokens` and `text` are what was added to the prompt.
    """

    tokenizer: Tokenizer
    prompt: int
    sample: int
    prompt_tokens: Sequence[int]
    key: int
    draw: int
    until: Until
    most_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    _begin: int = 0  # of the tokens that are decoded again
    _shown: int = 0  # tokens whose text is out, or held
    _held: str = ""  # text that may begin one that ends the row

    @property
    def place(self) -> int:
        """Return the place of the next token in the row."""
        return len(self.prompt_tokens) + len(self.tokens)

    def add(self, token: int) -> str:
        """Take the next token; return what of the text is certain by now and was not before."""
        if token in self.until.tokens:
            self.finish = "stop"
            return self._out(self._held + self._decoded(whole=True))
        self.tokens.append(token)
        if len(self.tokens) == self.until.num_tokens:
            self.finish = "length"
        elif len(self.tokens) == self.most_tokens:
            self.finish = "window"
        self._held += self._decoded(whole=self.finish is not None)
        places = [place for text in self.until.texts if (place := self._held.find(text)) >= 0]
        if places:
            self.finish = "stop"
            return self._out(self._held[: min(places)])
        certain = len(self._held) - (0 if self.finish else _begun(self._held, self.until.texts))
        text, self._held = self._held[:certain], self._held[certain:]
        return self._out(text)

    def _out(self, text: str) -> str:
        self.text += text
        return text

    def _decoded(self, *, whole: bool) -> str:
        """Return the text of tokens that is not out; none if its last character may not be whole, unless asked for."""
        tail = list(self.prompt_tokens[-CONTEXT:])
        row, before = tail + self.tokens, len(tail) + self._shown
        begin = self._begin
        old, new = (self.tokenizer.decode(row[begin:end]) for end in (before, len(row)))
        if len(new) <= len(old) or (new.endswith(PARTIAL) and not whole):
            return ""
        self._begin, self._shown = before, len(self.tokens)
        return new[len(old) :]


def _begun(text: str, ends: Sequence[str]) -> int:
    """Return how many of the last characters may begin one of some texts: 2 of "a--" for "--x" and "-y"."""
    sizes = (size for end in ends for size in range(1, len(end)) if text.endswith(end[:size]))
    return max(sizes, default=0)
