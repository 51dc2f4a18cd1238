"""`datakit diff`: find where two stores differ."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from datakit.commands.shared import Reporting
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK
from threefold.options import argument

if TYPE_CHECKING:
    from datakit.reports.difference import Side


@dataclass(frozen=True, kw_only=True)
class Options(Reporting):
    """Options of `datakit diff`."""

    left: str = argument("STORE", "a store in a local folder")
    right: str = argument("STORE", "the one to compare with it")


def run(options: Options) -> int:
    """Name the first document whose tokens differ in two stores and its first token that does, whatever the stores'
    shards; the exit code is then 1.
    """
    from datakit.reports.difference import find_difference
    from datakit.store.token_store import TokenStore

    stores = TokenStore.open(options.left), TokenStore.open(options.right)
    left, right = stores
    difference = find_difference(left, right)
    same_tokenizer = left.manifest.tokenizer.fingerprint == right.manifest.tokenizer.fingerprint
    if not same_tokenizer:
        print("warning: the stores' tokenizers differ: equal tokens may be other text", file=sys.stderr)
    if difference is None:
        counts = f"{left.num_documents:,} documents, {left.num_tokens:,} tokens"
        lines = [f"{left.path} and {right.path} hold the same {counts}"]
    else:
        sides = zip(stores, (difference.left, difference.right))
        lines = [f"document {difference.document:,} differs, first at its token {difference.token:,}"]
        lines += [f"  {store.path}: {_side(side, store.num_documents)}" for store, side in sides]
    content = {"same": difference is None, "same_tokenizer": same_tokenizer}
    options.show(content | {"difference": difference and asdict(difference)}, *lines)
    return EXIT_OK if difference is None else EXIT_CHECK_FAILED


def _side(side: "Side | None", num_documents: int) -> str:
    if side is None:
        return f"ends after {num_documents:,} documents"
    what = "it ends" if side.token is None else f"{side.token}"
    origin = side.origin
    source = f"{origin.path or 'no source'}, line {origin.line:,}, byte {origin.offset_bytes:,}"
    return f"{what}, of {side.num_tokens:,} tokens, from {source}"
