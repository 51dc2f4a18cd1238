"""The tokenizer of a checkpoint: which one reads prompts, which tokens end a text, and what else is beside its file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptkit import HfFolder
from datakit import Tokenizer, open_tokenizer, store_tokenizer
from threefold.errors import UserError, listing
from trainer.run.inference import Checkpoint


def prompt_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer to read a prompt with: the one that is named, else the run's own.

    That is the copy of the first of its stores that keeps one, or the file in a model's folder. UserError if there is
    none, if the run's own is another than the one named, or if it knows tokens that the model does not.
    """
    data, vocab_size = checkpoint.config.data, checkpoint.config.model.vocab_size
    own, reasons = own_tokenizer(checkpoint)
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer else own
    name = data.tokenizer or "the tokenizer that the run's stores keep"
    if tokenizer is None:
        raise UserError(
            "no tokenizer to read the prompt with" + "".join(f"; {reason}" for reason in reasons[:2]),
            hint="--data.tokenizer FILE, the one of the run's stores",
        )
    if own is not None and own.fingerprint != tokenizer.fingerprint and not data.any_tokenizer:
        raise UserError(
            f"{name} has fingerprint {tokenizer.fingerprint}, the tokenizer of the run's stores {own.fingerprint}",
            hint="leave --data.tokenizer out, or --data.any-tokenizer true",
        )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{name} has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            hint="--data.tokenizer FILE, the one of the run's stores",
        )
    return tokenizer


def own_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, list[str]]:
    """Return the tokenizer that a run's stores keep, or a model's folder, and why others did not have it."""
    reasons = []
    if isinstance(checkpoint.run, HfFolder):
        file = checkpoint.run.storage.local_path("tokenizer.json")
        if file is not None and file.is_file():
            return open_tokenizer(file), []
    for store in dict.fromkeys(checkpoint.stores):
        try:
            if (tokenizer := store_tokenizer(store)) is not None:
                return tokenizer, []
            reasons.append(f"{store} keeps no copy of its own")
        except UserError as why:  # it is gone, or cannot be read
            reasons.append(why.message)
    return None, reasons


def end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text, by number: those that end documents of the run's stores, or of a model."""
    numbers = list[int | None]()
    for store in dict.fromkeys(checkpoint.stores):
        try:
            numbers.append(checkpoint.config.data.tokenizer_of(store).eod_id)
        except UserError:  # it is gone, or cannot be read
            continue
    for name in ("generation_config.json", "config.json"):
        ids = json_beside(checkpoint, name).get("eos_token_id")
        numbers += ids if isinstance(ids, list) else [ids]
    name = special_tokens(json_beside(checkpoint, "tokenizer_config.json")).get("eos_token", "")
    numbers.append(tokenizer.token_id(name) if name else None)
    return frozenset(number for number in numbers if isinstance(number, int))


def token_numbers(tokenizer: Tokenizer, names: Iterable[str], vocab_size: int) -> frozenset[int]:
    """Return the numbers of tokens that are named by text, or by number; UserError if there is no such token."""
    numbers = set[int]()
    for name in names:
        number = tokenizer.token_id(name)
        if number is None and name.isdecimal() and int(name) < vocab_size:
            number = int(name)
        if number is None:
            own = [token for token in tokenizer.added_tokens() if token]
            raise UserError(
                f"the tokenizer has no token {name!r}"
                + (f"; of its own it has {', '.join(map(repr, own[:8]))}" if own else ""),
                hint=f"--stop {name!r} ends before this text, of whatever tokens",
            )
        numbers.add(number)
    return frozenset(numbers)


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, such as `eos_token`."""
    tokens = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in config.items()}
    return {name: text for name, text in tokens.items() if name.endswith("_token") and isinstance(text, str)}


def text_beside(checkpoint: Checkpoint, name: str) -> str | None:
    """Return what a file beside the tokenizer that reads prompts holds, or beside a model's; None if there is none."""
    named = checkpoint.config.data.tokenizer
    places = [Path(named) if Path(named).is_dir() else Path(named).parent] if named else []
    if isinstance(checkpoint.run, HfFolder) and (file := checkpoint.run.storage.local_path(name)) is not None:
        places.append(file.parent)
    for folder in places:
        try:
            return (folder / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {folder / name}: {error}", hint=listing(folder)) from error
    return None


def json_beside(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return the object in a JSON file there; empty if there is none."""
    try:
        value = json.loads(text_beside(checkpoint, name) or "{}")
    except ValueError as error:
        raise UserError(
            f"{name} beside the tokenizer is not JSON: {error}", hint="take it from the model again"
        ) from error
    return value if isinstance(value, dict) else {}
