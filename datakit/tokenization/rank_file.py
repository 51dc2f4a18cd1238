"""Rank files: the vocabulary of a byte-level BPE as tiktoken keeps it, one `base64 rank` a line; and tekken.json.

A rank file alone does not say how text is split into words nor which special tokens there are. Files that OpenAI has
published are known by their SHA-256; any other one has a sidecar beside it, `FILE.json`, that says it, and that is
obeyed beside a known one too. Ids below the largest rank are ranks or special tokens, none is missing.

A tekken.json, which is Mistral's, holds its pattern, ranks and special tokens. The latter have the first ids, and the
rank of each other token is counted from behind them. Only as many tokens count as the vocabulary's stated size leaves
room for; files hold more. A special token's name in a text is text, as in Mistral's own library, so that only what a
program puts there is one.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from threefold.errors import StorageError, UserError, quoted

SUFFIX = ".tiktoken"
MAX_RANK_FILE_BYTES, MAX_SIDECAR_BYTES = 32 << 20, 4 << 20
MAX_ID = (1 << 31) - 2  # ids are stored as int32
MAX_TEKKEN_BYTES, MAX_SPECIAL_TOKENS = 128 << 20, 1 << 16
_WITHOUT_SPECIAL_TOKENS = ("v1", "v2", "v3", "v7")  # versions whose files may leave them out: they are these
_SPECIAL_TOKENS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip
_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
R50K_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_SMALL, _LARGE = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_PATTERN = rf"{_LEAD}{_LARGE}*{_SMALL}+{_ENDING}|{_LEAD}{_LARGE}+{_SMALL}*{_ENDING}|\p{{N}}{{1,3}}|{_REST}"
TEKKEN_PATTERN = rf"{_LEAD}{_LARGE}*{_SMALL}+|{_LEAD}{_LARGE}+{_SMALL}*|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a rank file does not say: the regex that splits text into words, and the ids of the special tokens."""

    pattern: str
    special_tokens: dict[str, int]


_END = "<|endoftext|>"
_PUBLISHED = {  # by the SHA-256 of the ranks: r50k_base (of GPT-2), p50k_base, cl100k_base, o200k_base
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": Encoding(R50K_PATTERN, {_END: 50256}),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": Encoding(R50K_PATTERN, {_END: 50256}),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": Encoding(
        CL100K_PATTERN,
        {
            _END: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": Encoding(
        O200K_PATTERN, {_END: 199999, "<|endofprompt|>": 200018}
    ),
}


@dataclass(frozen=True, slots=True)
class RankFile:
    """The tokens of a rank file with their ids, how text is split for them, and the XXH3-128 of all of it.

    Ids are ranks counted from `first_id`. With `reads_special`, a special token's name in a text becomes its id.
    """

    ranks: dict[bytes, int]
    encoding: Encoding
    fingerprint: str
    first_id: int = 0
    reads_special: bool = True


def is_rank_file(path: Path, content: bytes) -> bool:
    """Return whether a file is one of ranks: by its name, or where it is a `.model` by its first line."""
    return path.suffix == SUFFIX or (path.suffix == ".model" and _FIRST_LINE.match(content) is not None)


def read_rank_file(path: Path, content: bytes) -> RankFile:
    """Parse the content of a rank file, and its sidecar; UserError names the line that is wrong."""
    if len(content) > MAX_RANK_FILE_BYTES:
        raise UserError(
            f"{path} has {len(content)} bytes, more than a rank file's {MAX_RANK_FILE_BYTES}",
            hint=f"head -1 {quoted(path)}",
        )
    encoding = _read_encoding(path, content)
    ranks = _parse_ranks(path, content, encoding.special_tokens)
    sidecar = orjson.dumps(encoding, option=orjson.OPT_SORT_KEYS)
    return RankFile(ranks, encoding, xxhash.xxh3_128_hexdigest(content + sidecar))


def sidecar_path(path: Path) -> Path:
    """Return the path of a rank file's sidecar."""
    return path.with_name(f"{path.name}.json")


def _read_encoding(path: Path, content: bytes) -> Encoding:
    sidecar = sidecar_path(path)
    try:
        if sidecar.stat().st_size > MAX_SIDECAR_BYTES:
            raise UserError(f"{sidecar} is larger than {MAX_SIDECAR_BYTES} bytes", hint=f"ls -l {quoted(sidecar)}")
        stated = sidecar.read_bytes()
    except FileNotFoundError:
        known = _PUBLISHED.get(hashlib.sha256(content).hexdigest())
        if known is None:
            raise UserError(
                f"{path} is a rank file of unknown origin: {sidecar} must say how its text is split",
                hint=f'write {{"pattern": REGEX, "special_tokens": {{TOKEN: ID, ...}}}} into {quoted(sidecar)}',
            ) from None
        return known
    except OSError as error:
        raise StorageError(f"cannot read {sidecar}: {error.strerror}", hint=f"ls -l {quoted(sidecar)}") from error
    try:
        return _parse_sidecar(orjson.loads(stated))
    except ValueError as error:  # invalid JSON is one too
        raise UserError(f"{sidecar}: {error}", hint=f"python -m json.tool {quoted(sidecar)}") from None


def _parse_sidecar(raw: Any) -> Encoding:
    """Return the encoding that a sidecar's JSON says; ValueError if it does not."""
    if not isinstance(raw, dict) or raw.keys() - {"special_tokens"} != {"pattern"}:
        raise ValueError('it must be an object of "pattern" and "special_tokens"')
    pattern, tokens = raw["pattern"], raw.get("special_tokens", {})
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f'"pattern" must be a regular expression, not {pattern!r}')
    if not isinstance(tokens, dict):
        raise ValueError(f'"special_tokens" must be an object of tokens and ids, not {tokens!r:.40}')
    owners: dict[int, str] = {}
    for token, number in tokens.items():
        if type(number) is not int or not 0 <= number <= MAX_ID or not token:
            raise ValueError(f"the special token {token!r} has the id {number!r}, which is not a number up to {MAX_ID}")
        if number in owners:
            raise ValueError(f"the special tokens {owners[number]!r} and {token!r} both have the id {number}")
        owners[number] = token
    return Encoding(pattern, tokens)


def _parse_ranks(path: Path, content: bytes, special_tokens: dict[str, int]) -> dict[bytes, int]:
    special = {number: token for token, number in special_tokens.items()}
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # by rank
    for line, text in enumerate(content.splitlines(), 1):
        if not text:
            continue
        try:
            encoded, number = text.split(b" ")
            token, rank = base64.b64decode(encoded, validate=True), _parse_rank(number)
        except (ValueError, binascii.Error):
            raise _fault(path, line, f"{text[:40]!r} is not a token in base64 and its rank") from None
        if not token:
            raise _fault(path, line, "a token of no bytes")
        if rank in special:
            raise _fault(path, line, f"rank {rank} is the id of the special token {special[rank]!r}")
        if rank in lines:
            raise _fault(path, line, f"rank {rank} was given in line {lines[rank]} already")
        if token in ranks:
            raise _fault(path, line, f"the token {token!r:.40} was given in line {lines[ranks[token]]} already")
        ranks[token], lines[rank] = rank, line
    byte = _missing_byte(ranks)
    if byte is not None:
        raise UserError(f"{path} has no token for the byte {byte}: is it complete?", hint=f"wc -l {quoted(path)}")
    known = sorted(lines.keys() | {number for number in special if number < max(lines)})
    for missing, rank in enumerate(known):
        if rank != missing:
            following = next(number for number in known[missing:] if number in lines)
            raise _fault(path, lines[following], f"before rank {following} there is no token of rank {missing}")
    return ranks


def _parse_rank(text: bytes) -> int:
    if not text.isdigit() or len(text) > 10 or int(text) > MAX_ID:
        raise ValueError(text)
    return int(text)


def _fault(path: Path, line: int, message: str) -> UserError:
    return UserError(f"{path}, line {line}: {message}", hint=f"sed -n {line}p {quoted(path)}")


def is_tekken(path: Path, content: bytes) -> bool:
    """Return whether a file is a tekken.json, by what only such a one says."""
    return path.suffix == ".json" and b'"default_num_special_tokens"' in content and b'"token_bytes"' in content


def read_tekken(path: Path, content: bytes) -> RankFile:
    """Parse the content of a tekken.json; UserError names the entry that is wrong."""
    if len(content) > MAX_TEKKEN_BYTES:
        raise UserError(
            f"{path} has {len(content)} bytes, more than {MAX_TEKKEN_BYTES}", hint=f"head -c 300 {quoted(path)}"
        )
    try:
        raw = orjson.loads(content)
        config = _typed(_typed(raw, dict, "the file")["config"], dict, "config")
        pattern = _typed(config["pattern"], str, "config.pattern")
        num_special = _typed(config["default_num_special_tokens"], int, "config.default_num_special_tokens")
        vocab_size = _typed(config["default_vocab_size"], int, "config.default_vocab_size")
        if not 0 <= num_special < vocab_size <= MAX_ID:
            raise ValueError(f"{num_special} special tokens in a vocabulary of {vocab_size}")
        special = _special_tokens(raw.get("special_tokens"), num_special, str(config.get("version")))
        ranks = _ranks(_typed(raw["vocab"], list, "vocab"), vocab_size - num_special, num_special)
    except (KeyError, ValueError) as error:  # invalid JSON is one too
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path}: {what}", hint=f"head -c 300 {quoted(path)}") from None
    return RankFile(ranks, Encoding(pattern, special), xxhash.xxh3_128_hexdigest(content), num_special, False)


def _special_tokens(raw: Any, count: int, version: str) -> dict[str, int]:
    """Return the ids of the special tokens by name; those that the file leaves out have names of their number."""
    if raw is None:
        if version not in _WITHOUT_SPECIAL_TOKENS:
            raise ValueError(f'it has no "special_tokens", which version {version} needs')
        raw = [{"rank": number, "token_str": name} for number, name in enumerate(_SPECIAL_TOKENS)]
    if count > MAX_SPECIAL_TOKENS:
        raise ValueError(f"{count:,} special tokens, at most {MAX_SPECIAL_TOKENS:,} are read")
    tokens: dict[str, int] = {}
    known = set[int]()
    for number, entry in enumerate(_typed(raw, list, "special_tokens")):
        place = f"special_tokens[{number}]"
        name = _typed(_typed(entry, dict, place)["token_str"], str, f"{place}.token_str")
        rank = _typed(entry["rank"], int, f"{place}.rank")
        if not 0 <= rank < count or rank in known or name in tokens:
            raise ValueError(f"{place}: {name!r} with the rank {rank}, of {count}, is there twice or out of range")
        tokens[name] = rank
        known.add(rank)
    for number in range(len(tokens), count):
        if number in known or f"<SPECIAL_{number}>" in tokens:
            raise ValueError(f"special_tokens: {len(tokens)} tokens are not numbered from 0")
        tokens[f"<SPECIAL_{number}>"] = number
    return tokens


def _ranks(vocab: list[Any], count: int, first_id: int) -> dict[bytes, int]:
    """Return the ids of the first tokens by their bytes."""
    if len(vocab) < count:
        raise ValueError(f"vocab has {len(vocab)} tokens, {count} are needed")
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(vocab[:count]):
        place = f"vocab[{number}]"
        encoded = _typed(_typed(entry, dict, place)["token_bytes"], str, f"{place}.token_bytes")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise ValueError(f"{place}.token_bytes is not base64: {encoded!r:.40}") from None
        if entry["rank"] != number or not token or token in ranks:
            raise ValueError(
                f"{place}: {token!r:.40} with the rank {entry['rank']!r:.20} is empty, there twice or astray"
            )
        ranks[token] = first_id + number
    byte = _missing_byte(ranks)
    if byte is not None:
        raise ValueError(f"vocab has no token for the byte {byte}")
    return ranks


def _missing_byte(ranks: dict[bytes, int]) -> str | None:
    return next((f"0x{byte:02x}" for byte in range(256) if bytes([byte]) not in ranks), None)


def _typed(value: Any, kind: type, place: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{place} must be of type {kind.__name__}, not {value!r:.40}")
    return value
