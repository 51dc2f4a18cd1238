"""TokenizerIdentity: what a store's manifest says of the tokenizer that made it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """The tokenizer that made a store: its kind, the XXH3-128 of its file, its size, its end-of-document token."""

    kind: str
    fingerprint: str
    vocab_size: int
    eod_token: str | None
    eod_id: int | None
