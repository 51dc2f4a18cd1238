"""Summary: what a run of preprocess made, and how fast."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """One store that came out."""

    path: str
    num_documents: int
    num_tokens: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of preprocess did; counts are the stores' (what was skipped, by reason), rates are of this run's.

    So is `backend`, None if nothing was left to tokenize, and how many documents the reference tokenized. A store
    says neither, as its bytes depend on neither. `num_replaced` documents had lone surrogates, which became U+FFFD; 0
    where the stores were complete before.
    """

    num_documents: int
    num_tokens: int
    num_items: int
    num_items_done_before: int
    input_bytes: int
    elapsed_s: float
    mb_per_s: float
    tokens_per_s: float
    stores: tuple[StoreSummary, ...]
    skipped: dict[str, int]
    backend: str | None
    num_by_reference: int
    num_replaced: int
