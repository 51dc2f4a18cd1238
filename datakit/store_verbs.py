"""The verbs of the `datakit` command that look into stores and make stores of stores; each imports what it needs."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from threefold.cli import print_json, print_line
from threefold.console import has_colours, print_table
from threefold.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError

if TYPE_CHECKING:
    from datakit.reports.difference import Side
    from datakit.reports.excerpt import Excerpt
    from datakit.reports.statistics import Statistics
    from datakit.store.token_store import TokenStore
    from datakit.tokenization.tokenizer import Tokenizer
    from threefold.cli import Parser

    Verbs = argparse._SubParsersAction[Parser]

_COLOURS, _PLAIN = ("\x1b[30;46m", "\x1b[30;43m"), "\x1b[0m"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def add_excerpt_flags(parser: argparse.ArgumentParser) -> None:
    """Let `inspect` show one document or sample."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--document", type=int, metavar="K", help="show this document, counted from 0")
    which.add_argument("--sample", type=int, metavar="K", help="show tokens [K L, K L + L], L from --seq-length")
    parser.add_argument("--seq-length", type=int, metavar="L", help="tokens of a sample")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer that made the store: shows text, not ids")


def asks_for_excerpt(arguments: argparse.Namespace) -> bool:
    """Whether `inspect` is to show a document or sample; UserError where its flags do not fit each other."""
    if (arguments.sample is None) != (arguments.seq_length is None):
        raise UserError("--sample and --seq-length go together", hint="--sample 0 --seq-length 4096")
    found = arguments.document is not None or arguments.sample is not None
    if arguments.tokenizer and not found:
        raise UserError("--tokenizer shows the text of one document or sample", hint="--document 0")
    return found


def inspect_excerpt(arguments: argparse.Namespace) -> int:
    """Show the tokens of one document or sample, as text where a tokenizer is given, and where they came from."""
    from datakit.reports.excerpt import document_excerpt, open_matching_tokenizer, sample_excerpt
    from datakit.store.token_store import TokenStore

    store = TokenStore.open(arguments.store)
    if arguments.document is not None:
        name, excerpt = "document", document_excerpt(store, arguments.document)
    else:
        name, excerpt = "sample", sample_excerpt(store, arguments.sample, arguments.seq_length)
    tokenizer = open_matching_tokenizer(store, arguments.tokenizer) if arguments.tokenizer else None
    if not arguments.json:
        _print_excerpt(excerpt, tokenizer)
        return EXIT_OK
    print_json(
        {
            "store": str(store.path),
            name: getattr(arguments, name),
            "first_token": excerpt.first_token,
            "ids": excerpt.tokens.tolist(),
            "text": tokenizer.decode(excerpt.tokens) if tokenizer else None,
            "sources": [
                {
                    "document": part.document,
                    "start": part.start,
                    "num_tokens": part.num_tokens,
                    **asdict(part.origin),
                    "tag": part.tag,
                }
                for part in excerpt.parts
            ],
        },
        masks=False,
    )
    return EXIT_OK


def _print_excerpt(excerpt: "Excerpt", tokenizer: "Tokenizer | None") -> None:
    from datakit.reports.excerpt import pieces

    for part, ids in excerpt.part_tokens():
        origin = part.origin
        print_line(
            f"document {part.document:,}, tokens {part.start:,} to {part.start + part.num_tokens:,}: "
            f"{origin.path or 'no source'}, line {origin.line:,}, byte {origin.offset_bytes:,}"
            + (f", tag {part.tag}" if part.tag else "")
        )
        if tokenizer is None:
            print(*ids.tolist())
        elif not sys.stdout.isatty():
            print(tokenizer.decode(ids))
        else:
            shown = (piece.translate(_CONTROLS) for piece in pieces(tokenizer, ids) if piece)
            colours = _COLOURS if has_colours(sys.stdout) else ("", "")
            plain = _PLAIN if has_colours(sys.stdout) else ""
            print("".join(f"{colours[i % 2]}{piece}{plain}" for i, piece in enumerate(shown)))


def add_stats(verbs: "Verbs") -> None:
    """Add the verb `stats`."""
    parser = verbs.add_parser("stats", help="count documents, lengths and sources", description=_stats.__doc__)
    parser.add_argument("stores", nargs="+", metavar="STORE", help="stores, counted together")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", metavar="FILE.html", help="write a page with plots too; needs threefold[plot]")
    parser.set_defaults(handler=_stats)


def _stats(arguments: argparse.Namespace) -> int:
    """Count documents and tokens by length, by tag and by source file, exactly, from the indices alone."""
    from datakit.reports.html import require_plots, write_report
    from datakit.reports.statistics import statistics

    if arguments.report:
        require_plots()
    found = statistics(arguments.stores)
    if arguments.report:
        write_report(found, arguments.report)
        print(f"wrote {arguments.report}", file=sys.stderr)
    if arguments.json:
        print_json(asdict(found))
    else:
        _print_statistics(found)
    return EXIT_OK


def _print_statistics(found: "Statistics") -> None:
    for store in found.stores:
        print(f"{store.path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens")
    if len(found.stores) > 1:
        print(f"together: {found.num_documents:,} documents, {found.num_tokens:,} tokens")
    print(f"empty documents  {found.num_empty_documents:,}")
    if lengths := found.lengths:
        print(
            f"tokens a document  min {lengths.min:,}  median {lengths.median:,}  p90 {lengths.p90:,}  "
            f"p99 {lengths.p99:,}  max {lengths.max:,}  mean {lengths.mean:,.1f}"
        )
    buckets = [
        (f"{bucket.min_length:,} to {bucket.max_length:,}" if bucket.max_length > 1 else f"{bucket.max_length}", bucket)
        for bucket in found.histogram
    ]
    rows = [(length, f"{bucket.num_documents:,}", f"{bucket.num_tokens:,}") for length, bucket in buckets]
    print()
    print_table(("length", "documents", "tokens"), rows)
    if found.tags:
        _print_shares("tag", [(tag.name or "no tag", tag.num_documents, tag.num_tokens) for tag in found.tags])
    sources = [(source.path or "no source", source.num_documents, source.num_tokens) for source in found.sources]
    others = found.other_sources
    if others.num_sources:
        sources.append((f"{others.num_sources:,} others", others.num_documents, others.num_tokens))
    _print_shares("source", sources)


def _print_shares(what: str, rows: Sequence[tuple[str, int, int]]) -> None:
    """Print names with their numbers of documents and tokens, the names last: they may be long."""
    print()
    cells = [(f"{num_tokens:,}", f"{num_documents:,}", name) for name, num_documents, num_tokens in rows]
    print_table(("tokens", "documents", what), cells, left={what})


def add_merge(verbs: "Verbs") -> None:
    """Add the verb `merge`."""
    parser = verbs.add_parser("merge", help="make one store of several", description=_merge.__doc__)
    parser.add_argument("stores", nargs="+", metavar="STORE", help="stores of one tokenizer, in this order")
    parser.add_argument("--output", required=True, metavar="STORE", help="folder of the store; a rerun continues in it")
    add_copy_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(handler=_merge)


def add_copy_flag(parser: argparse.ArgumentParser) -> None:
    """Let a verb copy files in place of linking them."""
    parser.add_argument(
        "--copy", action="store_true", help="copy the files, not link them: a link changes with its source"
    )


def _merge(arguments: argparse.Namespace) -> int:
    """Make one store of all shards of some stores, in the order given, without tokenizing again; documents keep their
    sources."""
    from datakit.store.merging import merge

    store = merge(arguments.stores, arguments.output, copy=arguments.copy)
    if {"append_eod"} & {name for part in store.manifest.settings["merged"] for name in part["settings"]}:
        print(
            "warning: documents of some of these stores end with a token of their own, others do not", file=sys.stderr
        )
    print_store(store, arguments.json)
    return EXIT_OK


def print_store(store: "TokenStore", as_json: bool) -> None:
    """Print the summary of a store that was made."""
    num_shards = len(store.manifest.shards)
    counts = {"num_documents": store.num_documents, "num_tokens": store.num_tokens, "num_shards": num_shards}
    if as_json:
        print_json({"path": str(store.path), **counts, "fingerprint": store.fingerprint})
    else:
        print(f"{store.path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens, {num_shards} shards")


def add_diff(verbs: "Verbs") -> None:
    """Add the verb `diff`."""
    parser = verbs.add_parser("diff", help="find where two stores differ", description=_diff.__doc__)
    parser.add_argument("left", metavar="STORE")
    parser.add_argument("right", metavar="STORE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    """Name the first document whose tokens differ in two stores and its first token that does, whatever the stores'
    shards; the exit code is then 1."""
    from datakit.reports.difference import find_difference
    from datakit.store.token_store import TokenStore

    stores = TokenStore.open(arguments.left), TokenStore.open(arguments.right)
    left, right = stores
    found = find_difference(left, right)
    same_tokenizer = left.manifest.tokenizer.fingerprint == right.manifest.tokenizer.fingerprint
    if not same_tokenizer:
        print("warning: the stores' tokenizers differ: equal tokens may be other text", file=sys.stderr)
    if arguments.json:
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
