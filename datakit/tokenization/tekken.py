"""tekken.json: Mistral's file of a tiktoken-like tokenizer, which holds its pattern, ranks and special tokens.

Special tokens have the first ids, and the rank of each other token is counted from behind them. Only as many tokens
count as the vocabulary's stated size leaves room for; files hold more. A special token's name in a text is text, as in
Mistral's own library, so that only what a program puts there is one.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

import orjson
import xxhash

from datakit.tokenization.rank_file import MAX_ID, Encoding, RankFile
from threefold.errors import UserError, quoted

MAX_TEKKEN_BYTES = 128 << 20
_WITHOUT_SPECIAL_TOKENS = ("v1", "v2", "v3", "v7")  # versions whose files may leave them out: they are these
_SPECIAL_TOKENS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip


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
    except KeyError as error:
        raise UserError(f"{path}: there is no {error}", hint=f"head -c 300 {quoted(path)}") from None
    except ValueError as error:  # invalid JSON is one too
        raise UserError(f"{path}: {error}", hint=f"head -c 300 {quoted(path)}") from None
    return RankFile(ranks, Encoding(pattern, special), xxhash.xxh3_128_hexdigest(content), num_special, False)


def _special_tokens(raw: Any, count: int, version: str) -> dict[str, int]:
    """Return the ids of the special tokens by name; those that the file leaves out have names of their number."""
    if raw is None:
        if version not in _WITHOUT_SPECIAL_TOKENS:
            raise ValueError(f'it has no "special_tokens", which version {version} needs')
        raw = [{"rank": number, "token_str": name} for number, name in enumerate(_SPECIAL_TOKENS)]
    tokens: dict[str, int] = {}
    for number, entry in enumerate(_typed(raw, list, "special_tokens")):
        place = f"special_tokens[{number}]"
        name = _typed(_typed(entry, dict, place)["token_str"], str, f"{place}.token_str")
        rank = _typed(entry["rank"], int, f"{place}.rank")
        if not 0 <= rank < count or rank in tokens.values() or name in tokens:
            raise ValueError(f"{place}: {name!r} with the rank {rank}, of {count}, is there twice or out of range")
        tokens[name] = rank
    for number in range(len(tokens), count):
        if number in tokens.values() or f"<SPECIAL_{number}>" in tokens:
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
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ValueError(f"vocab has no token for the byte 0x{missing:02x}")
    return ranks


def _typed(value: Any, kind: type, place: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{place} must be of type {kind.__name__}, not {value!r:.40}")
    return value
