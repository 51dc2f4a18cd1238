"""NamePattern: names of tensors with words taken out, as `layers.{n}.mlp.{rest*}`. Pure."""

import re
from collections.abc import Mapping
from functools import cached_property

_WORD = re.compile(r"\{([a-z][a-z0-9_]*)(\*?)\}")


class NamePattern:
    """A name in which {a} is a word without dots and slashes, {a*} any text, none too; the same again if it repeats."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "NamePattern":
        """Return the pattern that a text is; ValueError if it is none."""
        if not text or set(_WORD.sub("", text)) & set("{}"):
            raise ValueError("a name, with words like {n} or {rest*} in it")
        return cls(text)

    @cached_property
    def words(self) -> frozenset[str]:
        """The words that it takes out."""
        return frozenset(match[1] for match in _WORD.finditer(self.text))

    def words_of(self, name: str) -> dict[str, str] | None:
        """Return the words of a name that fits, None of one that does not."""
        match = self._regex.fullmatch(name)
        return None if match is None else match.groupdict()

    def filled(self, words: Mapping[str, str]) -> str:
        """Return the name with these words."""
        return _WORD.sub(lambda match: words[match[1]], self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, at, seen = [], 0, set[str]()
        for match in _WORD.finditer(self.text):
            word, is_any = match[1], bool(match[2])
            group = f"(?P={word})" if word in seen else f"(?P<{word}>{'.*' if is_any else '[^./]+'})"
            parts += [re.escape(self.text[at : match.start()]), group]
            at = match.end()
            seen.add(word)
        return re.compile("".join(parts) + re.escape(self.text[at:]), re.DOTALL)
