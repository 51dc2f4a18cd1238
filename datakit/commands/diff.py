"""`datakit diff`: find where two stores differ."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from datakit.commands.shared import Reporting
from threefold.cli import print_json
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
    found = find_difference(left, right)
    same_tokenizer = left.manifest.tokenizer.fingerprint == right.manifest.tokenizer.fingerprint
    if not same_tokenizer:
        print("warning: the stores' tokenizers differ: equal tokens may be other text", file=sys.stderr)
    if options.json:
        difference = asdict(found) if found else None
        print_json({"same": found is None, "same_tokenizer": same_tokenizer, "difference": difference})
    elif found is None:
        print(
            f"{left.path} and {right.path} hold the same {left.num_documents:,} documents, {left.num_tokens:,} tokens"
        )
    else:
        print(f"document {found.document:,} differs, first at its token {found.token:,}")
        for store, side in zip(stores, (found.left, found.right)):
            print(f"  {store.path}: {_side(side, store.num_documents)}")
    return EXIT_OK if found is None else EXIT_CHECK_FAILED


def _side(side: "Side | None", num_documents: int) -> str:
    if side is None:
        return f"ends after {num_documents:,} documents"
    what = "it ends" if side.token is None else f"{side.token}"
    origin = side.origin
    source = f"{origin.path or 'no source'}, line {origin.line:,}, byte {origin.offset_bytes:,}"
    return f"{what}, of {side.num_tokens:,} tokens, from {source}"
