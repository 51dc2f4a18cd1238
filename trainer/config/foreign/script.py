"""The command that a shell script runs, read without running anything.

Variables, arrays, defaults and arithmetic are put in, and simple conditions are decided. What only the shell could say
stays as it is written: `$1`, `$(date)`.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(r"\{([A-Za-z_]\w*|\d+)(\[[@*]\])?(?::?-(.*))?\}|([A-Za-z_]\w*|\d)", re.DOTALL)
WHOLE_LIST = re.compile(r'"\$\{(\w+)\[@\]\}"')
REDIRECTION = re.compile(r"\d?&?(?:>>?|<)(?:&\d|[ \t]*[^\s;|&]+)")
SEPARATORS = ("&&", "||", ";;", "\n", ";", "|", "&")
DECLARING = ("export", "local", "declare", "readonly", "typeset")
SUMS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARED: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
}


class Script:
    """A shell script that was read: `commands` are those that it runs, each as its words."""

    def __init__(self, text: str) -> None:
        """Read the statements in turn, without the branches that are not taken."""
        self._variables: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        branches: list[list[bool]] = []  # of each `if`: whether this branch runs, and whether one did
        for statement in statements(text):
            words = self._branch(statement, branches)
            if words and all(runs for runs, _ in branches):
                self._run(words)

    @property
    def words(self) -> list[str]:
        """The words of all that is assigned: a script may hold the flags of a command that another one runs."""
        return [word for values in self._variables.values() for text in values for word in text.split()]

    def _branch(self, words: list[str], branches: list[list[bool]]) -> list[str]:
        """Follow the keywords that a statement begins with; return what is left of it."""
        while words:
            head, *rest = words
            if head in ("then", "do", "{", "}"):
                words = rest
            elif head == "else":
                branches[-1:] = [[not taken, True] for _, taken in branches[-1:]]
                words = rest
            elif head in ("if", "elif"):
                is_so = self._is_so(rest)
                if head == "if":
                    branches.append([is_so, is_so])
                else:
                    branches[-1:] = [[is_so and not taken, taken or is_so] for _, taken in branches[-1:]]
                return []
            elif head in ("for", "while", "until", "case"):
                branches.append([head != "case", True])
                return []
            elif head in ("fi", "done", "esac"):
                del branches[-1:]
                words = rest
            else:
                return words
        return []

    def _is_so(self, words: Sequence[str], *, is_test: bool = False) -> bool:
        """Return whether a condition holds; what only the shell knows, as whether a file is there, does not."""
        closing = {"[": "]", "[[": "]]"}.get(words[0] if words else "")
        if closing and closing in words and words.index(closing) == len(words) - 1:
            return self._is_so(words[1:-1], is_test=True)
        for sign, holds in (("||", any), ("&&", all)):
            if sign in words:
                at = words.index(sign)
                return holds(self._is_so(part, is_test=is_test) for part in (words[:at], words[at + 1 :]))
        if words[:1] == ["!"]:
            return not self._is_so(words[1:], is_test=is_test)
        if not is_test or not words:
            return False
        texts = [" ".join(self.expand(word, unset="")) for word in words]
        if texts[0] in ("-z", "-n") and len(texts) <= 2:
            return (not "".join(texts[1:])) == (texts[0] == "-z")
        return len(texts) == 3 and texts[1] in COMPARED and COMPARED[texts[1]](texts[0], texts[2])

    def _run(self, words: list[str]) -> None:
        command: list[str] = []
        for word in [*words, ";"]:
            if word in SEPARATORS:
                if command:
                    self.commands.append([each for raw in command for each in self.expand(raw)])
                command = []
                continue
            match = ASSIGNMENT.fullmatch(word)
            if match and all(each in DECLARING for each in command):
                self._assign(match[1], match[3], adds=bool(match[2]))
            else:
                command.append(word)

    def _assign(self, name: str, raw: str, *, adds: bool) -> None:
        before = self._variables.get(name, []) if adds else []
        if raw.startswith("("):
            elements = [each for word in words_of(raw[1:-1]) if word not in SEPARATORS for each in self.expand(word)]
            self._variables[name] = [*before, *elements]
        else:
            text = " ".join(self.expand(raw, splits=False))
            self._variables[name] = ["".join([*before, text])]

    def expand(self, raw: str, *, splits: bool = True, unset: str | None = None) -> list[str]:
        """Return the words that a word becomes; `unset` is the text of a parameter that has none."""
        if (match := WHOLE_LIST.fullmatch(raw)) and match[1] in self._variables:
            return list(self._variables[match[1]])
        words: list[str] = []
        current: str | None = None
        for texts, is_quoted, is_list in self._pieces(raw, unset):
            if is_quoted and is_list:
                parts = [each for text in texts for each in ("\n", text)][1:]
            elif is_quoted or not splits:
                parts = [" ".join(texts)]
            else:
                parts = [each for each in re.split(r"(\s+)", " ".join(texts)) if each]
            for part in parts:
                if part.isspace() and (is_list or not is_quoted) and (splits or is_list):
                    words += [current] if current is not None else []
                    current = None
                else:
                    current = (current or "") + part
        return words + ([current] if current is not None else [])

    def _pieces(self, raw: str, unset: str | None) -> Iterator[tuple[list[str], bool, bool]]:
        """Yield the parts of a word: its texts, whether they are quoted, and whether they are a list's."""
        at, is_quoted = 0, False
        while at < len(raw):
            sign = raw[at]
            if sign == "'" and not is_quoted:
                end = raw.find("'", at + 1) % (len(raw) + 1)
                yield [raw[at + 1 : end]], True, False
                at = end + 1
            elif sign == '"':
                is_quoted = not is_quoted
                yield [""], True, False
                at += 1
            elif sign == "\\" and at + 1 < len(raw):
                yield [raw[at + 1]], True, False
                at += 2
            elif sign == "$":
                end = end_of(raw, at)
                texts, is_list = self._value(raw[at:end], unset)
                yield texts, is_quoted, is_list
                at = end
            else:
                yield [sign], True, False
                at += 1

    def _value(self, raw: str, unset: str | None) -> tuple[list[str], bool]:
        """Return what `$NAME`, `${NAME:-DEFAULT}`, `${LIST[@]}` or `$((SUM))` is, and whether it is a list."""
        if raw.startswith("$(("):
            inner = "".join(self.expand(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", raw[3:-2]), splits=False))
            number = sum_of(inner)
            return [raw if number is None else str(number)], False
        match = PARAMETER.fullmatch(raw[1:])
        if match is None:
            return [raw if unset is None else unset], False
        values = self._variables.get(match[1] or match[4])
        if match[3] is not None and not any(values or ()):
            return self.expand(match[3], splits=False, unset=unset), False
        if values is None:
            return [raw if unset is None else unset], False
        return values, bool(match[2])


def statements(text: str) -> Iterator[list[str]]:
    """Yield the statements of a script, each as its raw words."""
    statement: list[str] = []
    for word in [*words_of(text.replace("\\\r\n", " ").replace("\\\n", " ")), "\n"]:
        if word in ("\n", ";", ";;"):
            if statement:
                yield statement
            statement = []
        else:
            statement.append(word)


def words_of(text: str) -> Iterator[str]:
    """Yield raw words, with their quotes, and the separators between them; comments are left out."""
    at, word = 0, ""
    while at < len(text):
        if not word and (match := REDIRECTION.match(text, at)):
            at = match.end()
            continue
        separator = next((each for each in SEPARATORS if text.startswith(each, at)), "")
        if separator or text[at].isspace():
            if word:
                yield word
            word = ""
            if separator:
                yield separator
            at += len(separator) or 1
        elif text[at] == "#" and not word:
            at = text.find("\n", at) % (len(text) + 1)
        else:
            end = end_of(text, at, opens=bool(re.fullmatch(r"[A-Za-z_]\w*\+?=", word)))
            word += text[at:end]
            at = end
    if word:
        yield word


def end_of(text: str, at: int, *, opens: bool = False) -> int:
    """Return where that ends which begins at a place: a quoted text, `$(...)`, `${...}`, a list, or one letter."""
    if text.startswith("\\", at):
        return min(at + 2, len(text))
    if text[at] in "'`":
        return (text.find(text[at], at + 1) % (len(text) + 1)) + 1
    if text[at] == '"':
        return closed(text, at + 1, '"')
    if text[at] == "(" and opens:
        return closed(text, at + 1, ")")
    if text.startswith("$(", at):
        return closed(text, at + 2, ")")
    if text.startswith("${", at):
        return closed(text, at + 2, "}")
    match = re.compile(r"\$([A-Za-z_]\w*|\d)").match(text, at)
    return match.end() if match else at + 1


def closed(text: str, at: int, closing: str) -> int:
    """Return the place behind the sign that closes what is open, with what is quoted or nested passed over."""
    while at < len(text) and text[at] != closing:
        if text[at] == "#" and closing == ")" and text[at - 1].isspace():
            at = text.find("\n", at) % (len(text) + 1)
        elif closing == '"' and text[at] not in "\\$":
            at += 1
        else:
            at = end_of(text, at, opens=closing == ")")
    return at + 1


def sum_of(text: str) -> int | None:
    """Return the whole number that a sum is, None if it is not one."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
            return SUMS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
