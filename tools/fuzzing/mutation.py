"""Bytes after a few changes of the kinds that break parsers, drawn by a random generator; nothing else is random."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

EDGES = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**47,
    2**53,
    2**60,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/../../x",
    "\0",
    "é",
    "\ud800",
    "x" * 300,
    "NaN",
    "F32",
    "torch.float32",
)
VALUES: tuple[Any, ...] = (*EDGES, -1, 1.5, -0.0, 1e308, None, True, False, [], {}, [[]], *TEXTS)
MAX_CHANGES, MAX_RUN = 4, 64
Mutation = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return some bytes with flips, numbers, cuts, repeats, and parts of others."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, MAX_CHANGES)):
        _change(changed, rng, others)
    return bytes(changed)


def _change(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    run = rng.randint(1, MAX_RUN)
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.randrange(256)
        case 2:  # a number, as formats store them
            width = rng.choice((1, 2, 4, 8))
            order = rng.choice(("little", "big"))
            number = rng.choice(EDGES) if rng.random() < 0.7 else rng.getrandbits(64)
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, order)
        case 3:
            del data[at : at + run]
        case 4:
            del data[at:]
        case 5:
            data[at:at] = data[at : at + run]
        case 6:
            data[at:at] = rng.randbytes(run)
        case _:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at : at + rng.choice((0, run))] = other[start : start + run]


def mutated_json(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a JSON text with values replaced, left out, moved or nested; now and then any bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutated(data, rng, others)
    if rng.random() < 0.15 or not isinstance(document, dict | list):
        return mutated(data, rng, others)
    try:
        for _ in range(rng.randint(1, MAX_CHANGES)):
            change_json(document, rng)
        return json.dumps(document, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    except RecursionError:
        return data


def change_json(document: Any, rng: random.Random) -> None:
    """Change one value somewhere in a tree of lists and dicts, or leave it out."""
    holder = document
    while holder:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        holder = inner
    if not holder:
        return
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1:
            holder[key] = [copy.deepcopy(inner)]
        case 2 if isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = holder.pop(key)
        case 3 if isinstance(holder, list):
            holder.append(copy.deepcopy(inner))
        case 4 if isinstance(inner, str):
            holder[key] = inner[: rng.randrange(len(inner) + 1)] + rng.choice(TEXTS)
        case 5 if isinstance(inner, int):
            holder[key] = inner + rng.choice((-1, 1, 1 << 32))
        case 6:
            depth = rng.choice((3, 100, 600))
            holder[key] = json.loads("[" * depth + "]" * depth)
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
